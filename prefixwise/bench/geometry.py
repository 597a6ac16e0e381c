"""What requests of a benchmark look like: so many tokens, so many items, and which of them share a query."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixwise.bench.kinds.load import LoadGeometry
from prefixwise.contract.errors import PrefixwiseError

DEFAULT_LABELS = (9454, 2753)
_SMALL_VOCABULARY_LABELS = (0, 1)
_POOL = 32  # different queries and item lists, made before any clock starts
_POOL_TOKENS = 2_000_000  # of all lists: fewer of them where a request is large
_NUMBER_TOKENS = 3  # at the start of a query: they make it another one


class GeometryError(PrefixwiseError):
    """Requests of this shape cannot be made; the message names the option."""


@dataclass(frozen=True)
class Preset:
    """A geometry of the field."""

    query_tokens: int
    num_items: int
    item_tokens: int
    rate_qps: float | None = None


PRESETS = {"contract": Preset(2000, 500, 20), "small": Preset(300, 10, 20, rate_qps=120.0)}


def vocab_size_of(server_info: Mapping[str, Any]) -> int | None:
    """The vocabulary size that the server reports, or None."""
    for place in (server_info.get("model"), server_info.get("configuration"), server_info):
        found = place.get("vocab_size") if isinstance(place, Mapping) else None
        if isinstance(found, int):
            return found
    return None


def delimiter_of(server_info: Mapping[str, Any]) -> int | None:
    """The delimiter, which no item may contain; our server and SGLang report it under different names."""
    for place, name in (
        (server_info.get("configuration"), "delimiter_token_id"),
        (server_info, "multi_item_scoring_delimiter"),
    ):
        found = place.get(name) if isinstance(place, Mapping) else None
        if isinstance(found, int):
            return found
    return None


def choose_labels(given: Sequence[int] | None, vocab_size: int) -> list[int]:
    """The given labels, which must be in the vocabulary; else the defaults, or 0 and 1 in a small vocabulary."""
    if given is None:
        return list(DEFAULT_LABELS if max(DEFAULT_LABELS) < vocab_size else _SMALL_VOCABULARY_LABELS)
    if not given or not all(0 <= label < vocab_size for label in given):
        raise GeometryError(f"--label-token-ids must be from 0 to {vocab_size - 1}, got {list(given)}")
    return list(given)


class RequestMaker:
    """Requests of one geometry by their numbers: the same number and seed give the same request.

    All JSON is made here, once; a body is a few pieces put together, so that making one costs microseconds and no
    run is bounded by the bodies that fit into memory.
    """

    def __init__(self, geometry: LoadGeometry, seed: int, *, delimiter: int | None = None) -> None:
        self.geometry = geometry
        self.seed = seed
        self.delimiter = delimiter
        self._ids = [token for token in range(geometry.vocab_size) if token != delimiter]
        if not self._ids:
            raise GeometryError(f"--vocab-size leaves no token for a request, got {geometry.vocab_size}")
        self._rng = np.random.default_rng([seed, 0])
        self._number_len = min(_NUMBER_TOKENS, geometry.query_tokens)
        self._pool = max(1, min(_POOL, _POOL_TOKENS // max(1, geometry.num_items * geometry.item_tokens)))
        self._queries = [self._tokens(geometry.query_tokens - self._number_len) for _ in range(self._pool)]
        self._items = [[self._tokens(geometry.item_tokens) for _ in range(geometry.num_items)] for _ in self._queries]
        self._query_json = [("".join(f",{token}" for token in query) + "]").encode() for query in self._queries]
        labels = json.dumps(geometry.label_token_ids)
        end = f',"label_token_ids":{labels},"apply_softmax":true}}'
        self._rest_json = [
            f',"items":{json.dumps(items, separators=(",", ":"))}{end}'.encode() for items in self._items
        ]

    def _tokens(self, count: int) -> list[int]:
        return [self._ids[place] for place in self._rng.integers(len(self._ids), size=count)]

    def request(self, number: int, **fields: Any) -> dict[str, Any]:
        """The request as an object, with `fields` added."""
        query_number = self._query_number(number)
        return {
            "query": self._head(query_number) + self._queries[query_number % self._pool],
            "items": self._items[number % self._pool],
            "label_token_ids": self.geometry.label_token_ids,
            "apply_softmax": True,
            **fields,
        }

    def body(self, number: int) -> bytes:
        """The same as JSON."""
        query_number = self._query_number(number)
        head = f'{{"query":[{",".join(map(str, self._head(query_number)))}'.encode()
        return head + self._query_json[query_number % self._pool] + self._rest_json[number % self._pool]

    def _query_number(self, number: int) -> int:
        return number % self.geometry.distinct_queries if self.geometry.distinct_queries else number

    def _head(self, query_number: int) -> list[int]:
        """The number, one token per digit, last digit first: prefixes differ in their first token."""
        digits = []
        for _ in range(self._number_len):
            query_number, digit = divmod(query_number, len(self._ids))
            digits.append(self._ids[digit])
        return digits
