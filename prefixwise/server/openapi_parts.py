"""The pieces that schemas are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixwise.contract.token_ids import MAX_TOKEN_ID

Schema = dict[str, Any]

TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
IDS: Schema = {"type": "array", "items": TOKEN_ID}
TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
COUNT: Schema = {"type": "integer", "minimum": 0}


def optional(kind: str, text: str, default: object = None, **more: object) -> Schema:
    """A field that may be absent, which null means too."""
    return {"type": [kind, "null"], "default": default, "description": text, **more}


def choice(choices: Sequence[str], text: str, default: str | None) -> Schema:
    """One of some words, or absent."""
    return {"enum": [*choices, None], "default": default, "description": text}


MODEL = optional("string", 'A served name; the served model when absent or "default".')


def object_of(properties: Schema, *optional: str, **more: object) -> Schema:
    """An object that has all of these, but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties, **more}
