"""The user's cache folder, and what the environment says about ours."""

from __future__ import annotations

import os
from pathlib import Path

WEIGHT_CACHE_VARIABLE = "PREFIXWISE_WEIGHT_CACHE"
OFF = "off"


def user_cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def weight_cache_folder() -> Path | None:
    """Where dequantised weights are kept; None where the environment turns that off."""
    told = os.environ.get(WEIGHT_CACHE_VARIABLE)
    if told == OFF:
        return None
    return Path(told).expanduser() if told else user_cache_folder() / "prefixwise" / "weights"
