"""Embedding overrides in a prompt: which tokens of query and items the request's vectors take the place of.

Every token of the query that is `embed_override_token_id` gets a vector if the query has vectors, and so does every
one of an item that has vectors. Tokens of the suffix, the delimiter and the labels keep their embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.errors import InvalidValueError, RequestError
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged
from prefixwise.contract.request import ScoreRequest


@dataclass(frozen=True, eq=False)
class Overrides:
    """The vectors of a request. In its prompt, an id below 0 is the token of vector `~id`."""

    token_id: int
    vectors: Vectors  # [E, D]: those of the query, then those of the items

    def original_ids(self, ids: Int32Array) -> Int32Array:
        """The ids as the request has them."""
        return np.where(ids < 0, np.int32(self.token_id), ids)


def override_tokens(
    request: ScoreRequest, query: Int32Array, items: Ragged, item_errors: dict[int, RequestError]
) -> tuple[Int32Array, Ragged, Overrides | None]:
    """Query and items with ids below 0 for overridden tokens.

    Adds the errors of items to `item_errors`, or raises the first one unless the request wants a report: another number
    of vectors than of tokens, or a vector that `max_tokens_per_item` cuts off.
    """
    of_query, of_items, token_id = (
        request.query_embed_overrides,
        request.item_embed_overrides,
        request.embed_override_token_id,
    )
    if (of_query is None and of_items is None) or token_id is None:
        return query, items, None
    table: list[Vectors] = []
    if of_query is not None:
        tokens = np.flatnonzero(query == token_id)
        if len(tokens) != len(of_query):
            raise _mismatch("query", "query_embed_overrides", len(tokens), len(of_query), token_id, None)
        query = query.copy()
        query[tokens] = ~np.arange(len(tokens), dtype=np.int32)
        table.append(of_query)
    if of_items is not None:
        tokens, first = _item_tokens(request, items, token_id, item_errors), sum(map(len, table))
        flat = items.flat.copy()
        flat[tokens] = ~np.arange(first, first + len(tokens), dtype=np.int32)
        items = Ragged(flat, items.starts)
        table += [vectors for index, vectors in enumerate(of_items) if vectors is not None and index not in item_errors]
    return query, items, Overrides(token_id, np.concatenate(table)) if sum(map(len, table)) else None


def _item_tokens(
    request: ScoreRequest, items: Ragged, token_id: int, item_errors: dict[int, RequestError]
) -> Int64Array:
    """The overridden tokens of all items without an error, as places in `items.flat`."""
    assert request.item_embed_overrides is not None
    tokens = np.flatnonzero(items.flat == token_id)
    item_of = np.searchsorted(items.starts, tokens, side="right") - 1
    counts = np.bincount(item_of, minlength=len(items))
    is_cut = np.zeros(len(items), bool)
    if request.max_tokens_per_item is not None:
        is_cut[item_of[tokens - items.starts[item_of] >= request.max_tokens_per_item]] = True
    is_overridden = np.zeros(len(items), bool)
    for index, vectors in enumerate(request.item_embed_overrides):
        if vectors is None or index in item_errors:
            continue
        error = _item_error(request, index, int(counts[index]), len(vectors), is_cut=bool(is_cut[index]))
        if error is None:
            is_overridden[index] = True
        elif request.on_item_error == "fail":
            raise error
        else:
            item_errors[index] = error
    found: Int64Array = tokens[is_overridden[item_of]]
    return found


def _item_error(
    request: ScoreRequest, index: int, num_tokens: int, num_vectors: int, *, is_cut: bool
) -> RequestError | None:
    name, param, token_id = f"items[{index}]", "item_embed_overrides", request.embed_override_token_id
    if num_tokens != num_vectors:
        return _mismatch(name, param, num_tokens, num_vectors, token_id, index)
    if is_cut:
        most = request.max_tokens_per_item
        message = f"{name} must have its overridden tokens among its first {most} tokens (max_tokens_per_item)"
        return InvalidValueError(
            f"{message}, got one behind them", code="embed_overrides_truncated", param=param, item_index=index
        )
    return None


def _mismatch(
    name: str, param: str, num_tokens: int, num_vectors: int, token_id: int | None, index: int | None
) -> InvalidValueError:
    place = param if index is None else f"{param}[{index}]"
    message = (
        f"{place} must hold a vector for each token {token_id} (embed_override_token_id) of {name}: "
        f"expected {num_tokens}, got {num_vectors}"
    )
    return InvalidValueError(message, code="embed_overrides_mismatch", param=param, item_index=index)
