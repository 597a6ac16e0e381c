"""What a front must know of a request before it sends it on: whose cache it wants, and about how much work it is.

Nothing is judged here. A body that is no legal request has no key, goes to any replica, and gets that one's error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import orjson

from prefixwise.cluster.exchange import HttpRequest

# Routes whose prefix is made of the query, and of these fields beside it.
_KEYED_PATHS = frozenset({"/v1/score", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/prefix"})
_PREFIX_FIELDS = ("query", "profile", "instruction")
_ITEM_FIELDS = ("items", "documents", "texts")
_BYTES_PER_TOKEN = 4  # of text, about
_NUMBERS_PER_BYTE = 0.2  # of token ids as JSON: four digits and a comma


@dataclass(frozen=True)
class RequestKey:
    """Where a request belongs, and what it weighs."""

    key: bytes | None = None  # the same for all requests that share a prefix; None: any replica will do
    tokens: int = 0  # about


def key_of(request: HttpRequest) -> RequestKey:
    """By the query and what else the prefix is made of; item-first requests share none."""
    if request.method != "POST" or request.path not in _KEYED_PATHS:
        return RequestKey()
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError:
        return RequestKey()
    if not isinstance(body, dict):
        return RequestKey()
    tokens = _about_tokens(request.body, body)
    if body.get("query") is None or body.get("item_first") is True:
        return RequestKey(None, tokens)
    try:
        prefix = orjson.dumps({name: body.get(name) for name in _PREFIX_FIELDS})
    except TypeError:  # lists within lists, deeper than it writes
        return RequestKey(None, tokens)
    return RequestKey(blake2b(prefix, digest_size=16).digest(), tokens)


def _about_tokens(raw: bytes, body: Mapping[str, object]) -> int:
    """From the size of the body: nothing is tokenized here."""
    is_text = isinstance(body.get("query"), str) or any(_holds_text(body.get(name)) for name in _ITEM_FIELDS)
    return int(len(raw) / _BYTES_PER_TOKEN if is_text else len(raw) * _NUMBERS_PER_BYTE)


def _holds_text(items: object) -> bool:
    return isinstance(items, list) and bool(items) and isinstance(items[0], (str, dict))
