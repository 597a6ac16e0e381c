"""Seeded damage to files, and the verdict on what a loader makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from prefixwise.contract.errors import PrefixwiseError

# Values of a type, sign or size that a field does not expect.
WRONG_VALUES: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, -1, -(2**63), 2**64, 10**400, True, False, "", "x", "\ud800", [], {}, [[[]]],
    [-1], {"x": None},
)  # fmt: skip
_NUMBERS = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 2**63 - 1, 2**63, 2**64 - 1)


def damaged(content: bytes, random: Random, *, first: int = 0, stop: int | None = None) -> bytes:
    """A copy with one piece of damage that begins in [first, stop): bits, bytes, numbers, missing or added ranges."""
    stop = len(content) if stop is None else stop
    at = random.randrange(first, max(first + 1, stop))
    length = random.choice((1, 2, 4, 8, 8, 31, 32, 64, 4096))
    changed = bytearray(content)
    kind = random.randrange(9)
    if kind == 0:
        changed[at] ^= 1 << random.randrange(8)
    elif kind == 1:
        changed[at] = random.choice((0, 1, 0x22, 0x2C, 0x7F, 0x80, 0xFF))
    elif kind == 2:
        changed[at : at + length] = bytes(len(changed[at : at + length]))
    elif kind == 3:
        del changed[at : at + length]
    elif kind == 4:
        changed[at:at] = random.randbytes(length)
    elif kind == 5:
        changed[at:at] = changed[at : at + length]
    elif kind == 6:
        del changed[at:]
    elif kind == 7:
        other = random.randrange(first, max(first + 1, stop))
        changed[at : at + length], changed[other : other + length] = (
            changed[other : other + length],
            changed[at : at + length],
        )
    else:
        size = random.choice((4, 8))
        changed[at : at + size] = (random.choice(_NUMBERS) % 256**size).to_bytes(size, "little")
    return bytes(changed)


def with_wrong_value(document: Any, random: Random) -> Any:
    """A copy of a JSON document with a wrong value in one place."""
    changed = deepcopy(document)
    places = list(_places(changed))
    holder, key = random.choice(places)
    holder[key] = deepcopy(random.choice(WRONG_VALUES))
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def damaged_json(content: bytes, random: Random) -> bytes:
    """The text of a JSON document with a wrong value, nested too deep, or with damaged bytes."""
    kind = random.randrange(8)
    if kind == 0:
        return damaged(content, random)
    if kind == 1:
        return content[: random.randrange(len(content))]
    if kind == 2:
        depth = 100_000
        return content.replace(b":", b":" + b"[" * depth, 1)
    return json.dumps(with_wrong_value(json.loads(content), random)).encode()


def verdict(path: Path, load: Callable[[], Any], error: type[PrefixwiseError] = PrefixwiseError) -> Any:
    """What the loader returns, or None if it refuses the file: in one line of the right kind that names it."""
    try:
        return load()
    except error as refusal:
        message = str(refusal)
        assert str(path) in message, message
        assert len(message.splitlines()) == 1, message
        return None
