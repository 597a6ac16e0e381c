"""Files as a check reads them: JSON by the letter, and paths from artifacts, which may be anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn, TypeGuard


def parse_json(content: bytes) -> Any:
    """Raises ValueError, also for NaN and Infinity, which Python reads and JSON does not have."""
    try:
        return json.loads(content, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("lists or objects in each other, too deep to be read") from None


def find_file(path: str, beside: Path) -> Path | None:
    """Where the artifact says, or under the same name beside the artifact."""
    return next(iter(find_files(path, beside)), None)


def find_files(path: str, beside: Path) -> list[Path]:
    """All that it could be: a folder of artifacts that was copied still names the place it came from."""
    places = dict.fromkeys((Path(path), beside.parent / Path(path).name))
    return [place for place in places if is_file(place)]


def is_file(path: Path) -> bool:
    """Also of a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_number(value: object) -> TypeGuard[int | float]:
    """One that can be computed with: finite, and no int that is too large; True, an int to Python, is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word}, which is no number of JSON")
