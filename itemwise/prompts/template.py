"""From a request to the token sequences that the model sees.

    apart       [BOS] query [delimiter] | item | suffix      each | is a border between separate tokenizations
    joint       [BOS] query + item | suffix                  one text, as a plain prompt would be
    item_first  [BOS] item | [delimiter] query | suffix      nothing is shared

The prefix is what the request's items have in common by construction: the part before the first `|` of `apart`, and in
`joint` the query's own tokens, of which an item may share a little less (`plan/shared_prefix.py` finds out).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from itemwise.contract.errors import InvalidValueError, RequestError, TokenizerError
from itemwise.contract.ragged import Int32Array, Int64Array, Ragged, ranges, starts_from_lens
from itemwise.contract.request import ScoreRequest
from itemwise.contract.result import Truncation
from itemwise.prompts.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Prompt:
    """Token ids of a request. Row i of `sequences` is item i; without `joined` the prefix stands before it."""

    prefix_ids: Int32Array
    sequences: Ragged
    joined: bool  # rows are whole sequences, which may begin with the prefix's tokens or not
    label_ids: tuple[tuple[int, ...], ...]  # one tuple of token ids per label
    prompt_tokens: int  # what the caller sent: the query once and all items
    truncated: tuple[Truncation, ...] = ()
    item_errors: dict[int, RequestError] = field(default_factory=dict)

    def take(self, items: Int64Array) -> Prompt:
        """The prompt of some items alone."""
        return self if len(items) == len(self.sequences) else replace(self, sequences=self.sequences.take(items))

    def context_lens(self) -> Int64Array:
        """[I]: how many tokens the model sees for each item."""
        return self.sequences.lens + (0 if self.joined else len(self.prefix_ids))


@dataclass(frozen=True)
class _Parts:
    """The request's pieces as ids, before they are put together."""

    query: Int32Array
    items: Ragged
    suffix: Int32Array
    leading: Int32Array


def build_prompt(request: ScoreRequest, tokenizer: TextTokenizer | None, delimiter: int | None) -> Prompt:
    """Tokenize and arrange. Raises RequestError where the tokens are at fault, TokenizerError without a tokenizer."""
    parts = _tokenize(request, tokenizer)
    if not len(parts.query):
        raise InvalidValueError("query must hold at least one token, got none", code="empty_query", param="query")
    item_errors = dict(request.item_errors)
    if delimiter is not None:
        _check_delimiter(request, parts, delimiter, item_errors)
    items, truncated = _truncate(parts.items, request.max_tokens_per_item)
    parts = _Parts(parts.query, items, parts.suffix, parts.leading)
    between = np.asarray([] if delimiter is None else [delimiter], np.int32)
    prefix_ids, sequences, joined = _arrange(request, tokenizer, parts, between)
    return Prompt(
        prefix_ids=prefix_ids,
        sequences=sequences,
        joined=joined,
        label_ids=_label_ids(request, tokenizer),
        prompt_tokens=len(parts.query) + len(items.flat),
        truncated=truncated,
        item_errors=item_errors,
    )


def _tokenize(request: ScoreRequest, tokenizer: TextTokenizer | None) -> _Parts:
    nothing = np.zeros(0, np.int32)
    suffix = request.suffix if request.suffix is not None else nothing
    if isinstance(request.query, str):
        tokenizer = _require(tokenizer)
        assert isinstance(request.items, tuple), "a text query comes with text items"
        suffix_ids = tokenizer.encode(suffix) if isinstance(suffix, str) else suffix
        items = tokenizer.encode_many(request.items)
        return _Parts(tokenizer.encode(request.query), items, suffix_ids, tokenizer.leading_ids)
    assert isinstance(request.items, Ragged), "an id query comes with id items"
    assert not isinstance(suffix, str), "an id query comes with an id suffix"
    return _Parts(request.query, request.items, suffix, nothing)  # ids are used as they are: no BOS


def _require(tokenizer: TextTokenizer | None) -> TextTokenizer:
    if tokenizer is None:
        raise TokenizerError("this model has no tokenizer, so text cannot be scored; send token ids instead")
    return tokenizer


def _truncate(items: Ragged, max_tokens: int | None) -> tuple[Ragged, tuple[Truncation, ...]]:
    """Cut the ends of long items, and say which."""
    if max_tokens is None or not np.any(items.lens > max_tokens):
        return items, ()
    cut = np.flatnonzero(items.lens > max_tokens)
    report = tuple(Truncation(int(i), int(items.lens[i]), max_tokens) for i in cut)
    kept_lens = np.minimum(items.lens, max_tokens)
    return Ragged(items.flat[ranges(items.starts[:-1], kept_lens)], starts_from_lens(kept_lens)), report


def _arrange(
    request: ScoreRequest, tokenizer: TextTokenizer | None, parts: _Parts, between: Int32Array
) -> tuple[Int32Array, Ragged, bool]:
    """Prefix, rows, and whether the rows are whole sequences."""
    if request.item_first:
        after = np.concatenate([between, parts.query, parts.suffix])
        return np.zeros(0, np.int32), surround(parts.leading, parts.items, after), True
    prefix = np.concatenate([parts.leading, parts.query, between])
    # A delimiter is a token border of its own, and ids have no text to join: both make `joint` the same as `apart`.
    if request.tokenization == "joint" and isinstance(request.query, str) and not len(between):
        return prefix, surround(parts.leading, _joint_rows(request, _require(tokenizer)), parts.suffix), True
    return prefix, surround(between[:0], parts.items, parts.suffix), False


def _joint_rows(request: ScoreRequest, tokenizer: TextTokenizer) -> Ragged:
    """`query + item` as one text each. An item to be truncated is cut first, at its own tokens."""
    assert isinstance(request.query, str)
    assert isinstance(request.items, tuple)
    texts = [request.query + tokenizer.cut(item, request.max_tokens_per_item) for item in request.items]
    return tokenizer.encode_many(texts)


def surround(before: Int32Array, rows: Ragged, after: Int32Array) -> Ragged:
    """Every row with the same ids put before and after it."""
    if not len(before) and not len(after):
        return rows
    lens = rows.lens + (len(before) + len(after))
    starts = starts_from_lens(lens)
    flat = np.empty(int(starts[-1]), np.int32)
    flat[ranges(starts[:-1] + len(before), rows.lens)] = rows.flat
    flat[starts[:-1, None] + np.arange(len(before))] = before
    flat[starts[1:, None] - len(after) + np.arange(len(after))] = after
    return Ragged(flat, starts)


def _label_ids(request: ScoreRequest, tokenizer: TextTokenizer | None) -> tuple[tuple[int, ...], ...]:
    if request.label_token_ids is not None:
        return request.label_token_ids
    assert request.labels is not None, "a request has labels in one form or the other"
    tokenizer = _require(tokenizer)
    if request.label_scoring == "single":
        return tuple((tokenizer.label_id(label, i),) for i, label in enumerate(request.labels))
    return tuple(tokenizer.label_sequence(label, i) for i, label in enumerate(request.labels))


def _check_delimiter(
    request: ScoreRequest, parts: _Parts, delimiter: int, item_errors: dict[int, RequestError]
) -> None:
    if np.any(parts.query == delimiter):
        raise _collision("query", int(np.flatnonzero(parts.query == delimiter)[0]), delimiter, None)
    for hit in np.flatnonzero(parts.items.flat == delimiter):
        item = int(np.searchsorted(parts.items.starts, hit, side="right")) - 1
        error = _collision(f"items[{item}]", int(hit - parts.items.starts[item]), delimiter, item)
        if request.on_item_error == "fail":
            raise error
        item_errors.setdefault(item, error)


def _collision(where: str, position: int, delimiter: int, item: int | None) -> RequestError:
    return InvalidValueError(
        f"{where} must not hold the delimiter token {delimiter}, got it at token {position}",
        code="delimiter_collision",
        param=where.partition("[")[0],
        item_index=item,
    )
