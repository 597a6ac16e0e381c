"""Models whose tokenizer is known without its files: `known_models.toml`, for machines that hold no model."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    """What a workload needs to know of a tokenizer."""

    vocab_size: int  # rows of the embedding
    num_tokens: int  # ids from here on have a row but no token
    special_ids: tuple[int, ...]
    eos_id: int


@cache
def known_models() -> dict[str, KnownModel]:
    """By hub id."""
    text = files("prefixwise.bench").joinpath("known_models.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["model"]
    return {name: _known_model(entry) for entry in entries for name in entry["names"]}


def _known_model(entry: dict[str, Any]) -> KnownModel:
    special = tuple(token_id for first, last in entry["special_token_ids"] for token_id in range(first, last + 1))
    return KnownModel(entry["vocab_size"], entry["num_tokens"], special, entry["eos_token_id"])
