"""From a request to the token sequences that the model sees.

    apart       [BOS] query [delimiter] | item | suffix      each | is a border between separate tokenizations
    joint       [BOS] query + item | suffix                  one text, as a plain prompt would be
    item_first  [BOS] item | [delimiter] query | suffix      nothing is shared; in joint, item + query is one

The prefix is what the request's items have in common by construction: the part before the first `|` of
`apart`, and in `joint` the query's own tokens, of which an item may share a little less
(`plan/shared_prefix.py` finds out). A delimiter is a border of its own, and ids have no text to join: with
either of them `joint` is the same as `apart`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from prefixwise.contract.errors import InvalidValueError, RequestError, TokenizerError
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, ranges, starts_from_lens
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.result import Truncation
from prefixwise.prompts.tokenizer import TextTokenizer

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Prompt:
    """Token ids of a request. Row i of `sequences` is item i; unless `joined` the prefix stands before it."""

    prefix_ids: Int32Array
    sequences: Ragged
    joined: bool  # rows are whole sequences, which may begin with the prefix's tokens or not
    label_ids: tuple[tuple[int, ...], ...]  # one tuple of token ids per label
    prompt_tokens: int  # what the caller sent: the query once and all items
    truncated: tuple[Truncation, ...] = ()
    item_errors: dict[int, RequestError] = field(default_factory=dict)
    shared_lens: Int64Array | None = None  # [I]: how much of the prefix stands before each row; None: all of it
    items_field: str = "items"  # what the request calls the items, for errors

    def take(self, items: Int64Array) -> Prompt:
        """The prompt of some items alone."""
        if len(items) == len(self.sequences):
            return self
        shared_lens = None if self.shared_lens is None else self.shared_lens[items]
        return replace(self, sequences=self.sequences.take(items), shared_lens=shared_lens)

    def context_lens(self) -> Int64Array:
        """[I]: how many tokens the model sees for each item."""
        return self.sequences.lens + self._lens_before()

    def context(self, item: int) -> Int32Array:
        """All tokens that the model sees for one item."""
        return np.concatenate([self.prefix_ids[: self._lens_before()[item]], self.sequences[item]])

    def _lens_before(self) -> Int64Array:
        if self.joined:
            return np.zeros(len(self.sequences), np.int64)
        return np.full(len(self.sequences), len(self.prefix_ids)) if self.shared_lens is None else self.shared_lens


@dataclass(frozen=True)
class _Parts:
    """The request's pieces as ids, before they are put together."""

    query: Int32Array
    items: Ragged
    suffix: Int32Array
    leading: Int32Array


def build_prompt(request: ScoreRequest, tokenizer: TextTokenizer | None, delimiter: int | None) -> Prompt:
    """Tokenize and arrange.

    Raises RequestError where the tokens are at fault, TokenizerError where there is text and no tokenizer.
    """
    parts = _tokenize(request, tokenizer)
    _check_query(parts.query, delimiter)
    item_errors = dict(request.item_errors)
    if delimiter is not None:
        _check_delimiter(request, parts, delimiter, item_errors)
    num_sent = len(parts.query) + len(parts.items.flat)
    items, truncated = _truncate(parts.items, request.max_tokens_per_item)
    parts = replace(parts, items=items)
    if request.tokenization == "joint" and request.is_text and delimiter is None:
        prefix_ids, sequences, joined = _arrange_joint(request, _require(tokenizer), parts, truncated)
    else:
        prefix_ids, sequences, joined = _arrange_apart(request, parts, delimiter)
    return Prompt(
        prefix_ids=prefix_ids,
        sequences=sequences,
        joined=joined,
        label_ids=_label_ids(request, tokenizer),
        prompt_tokens=num_sent,
        truncated=truncated,
        item_errors=item_errors,
    )


def build_prefix(query: str | Int32Array, tokenizer: TextTokenizer | None, delimiter: int | None) -> Int32Array:
    """What the items of any request with this query have in common (but for `item_first`). Raises as `build_prompt`."""
    leading = _NOTHING
    if isinstance(query, str):
        tokenizer = _require(tokenizer)
        query, leading = tokenizer.encode(query), tokenizer.leading_ids
    _check_query(query, delimiter)
    between = _NOTHING if delimiter is None else np.asarray([delimiter], np.int32)
    return np.concatenate([leading, query, between])


def _check_query(query: Int32Array, delimiter: int | None) -> None:
    if not len(query):
        message = "query must hold at least one token, got a text that has none"
        raise InvalidValueError(message, code="empty_query", param="query")
    if delimiter is not None and np.any(query == delimiter):
        raise _collision("query", int(np.flatnonzero(query == delimiter)[0]), delimiter, None)


def _tokenize(request: ScoreRequest, tokenizer: TextTokenizer | None) -> _Parts:
    suffix = request.suffix if request.suffix is not None else _NOTHING
    if isinstance(request.query, str):
        tokenizer = _require(tokenizer)
        assert isinstance(request.items, tuple), "a text query comes with text items"
        suffix_ids = tokenizer.encode(suffix) if isinstance(suffix, str) else suffix
        items = tokenizer.encode_many(request.items)
        return _Parts(tokenizer.encode(request.query), items, suffix_ids, tokenizer.leading_ids)
    assert isinstance(request.items, Ragged), "an id query comes with id items"
    assert not isinstance(suffix, str), "an id query comes with an id suffix"
    return _Parts(request.query, request.items, suffix, _NOTHING)  # ids are used as they are: no BOS


def _require(tokenizer: TextTokenizer | None) -> TextTokenizer:
    if tokenizer is None:
        raise TokenizerError("this model has no tokenizer, so text cannot be scored; send token ids instead")
    return tokenizer


def _truncate(items: Ragged, max_tokens: int | None) -> tuple[Ragged, tuple[Truncation, ...]]:
    """Cut the ends of long items, and say which."""
    if max_tokens is None:
        return items, ()
    cut = np.flatnonzero(items.lens > max_tokens)
    report = tuple(Truncation(int(i), int(items.lens[i]), max_tokens) for i in cut)
    kept_lens = np.minimum(items.lens, max_tokens)
    return Ragged(items.flat[ranges(items.starts[:-1], kept_lens)], starts_from_lens(kept_lens)), report


def _arrange_apart(request: ScoreRequest, parts: _Parts, delimiter: int | None) -> tuple[Int32Array, Ragged, bool]:
    """Prefix, rows, and whether the rows are whole sequences."""
    between = _NOTHING if delimiter is None else np.asarray([delimiter], np.int32)
    if request.item_first:
        after = np.concatenate([between, parts.query, parts.suffix])
        return _NOTHING, surround(parts.leading, parts.items, after), True
    prefix = np.concatenate([parts.leading, parts.query, between])
    return prefix, surround(_NOTHING, parts.items, parts.suffix), False


def _arrange_joint(
    request: ScoreRequest, tokenizer: TextTokenizer, parts: _Parts, truncated: tuple[Truncation, ...]
) -> tuple[Int32Array, Ragged, bool]:
    """The same. An item to be truncated is cut first, at its own tokens."""
    assert isinstance(request.query, str), "ids have no text to join"
    assert isinstance(request.items, tuple), "a text query comes with text items"
    items = list(request.items)
    for cut in truncated:
        items[cut.index] = tokenizer.cut(items[cut.index], cut.kept_tokens)
    query, item_first = request.query, request.item_first
    rows = tokenizer.encode_many([item + query if item_first else query + item for item in items])
    prefix = _NOTHING if item_first else np.concatenate([parts.leading, parts.query])
    return prefix, surround(parts.leading, rows, parts.suffix), True


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
