"""From a score request to the token sequences that the model sees, and the check that they fit the model.

    separate    [BOS] query [delimiter] | item | suffix      the texts between | are tokenized separately
    joint       [BOS] query + item | suffix                  query and item are tokenized as one text
    item_first  [BOS] item | [delimiter] query | suffix      nothing is shared; with joint, item + query is one text

The prefix is the part that all items share: with `separate` everything before the first `|`, with `joint` the query's
tokens, of which an item may share a few less (`plan/segments.py` finds how many). With a delimiter or with token ids,
`joint` is the same as `separate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from prefixwise.contract.checks import check_token_count
from prefixwise.contract.errors import InvalidValueError, RequestError, TokenizerError, VocabularyError, quote
from prefixwise.contract.fields import MAX_WARNINGS
from prefixwise.contract.inputs import Place
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, ranges, starts_from_lens
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.result import Truncation
from prefixwise.models.config import ModelConfig
from prefixwise.prompts.overrides import Overrides, override_tokens
from prefixwise.prompts.tokenizer import LONG_CHARS, TextTokenizer

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Prompt:
    """The token ids of a request. `sequences[i]` is item i; unless `joined`, the prefix comes before it."""

    prefix_ids: Int32Array
    sequences: Ragged
    joined: bool  # the sequences are whole; they may begin with tokens of the prefix
    label_ids: tuple[tuple[int, ...], ...]  # one tuple of token ids per label
    prompt_tokens: int  # that the caller sent: the query once and all items
    truncated: tuple[Truncation, ...] = ()
    item_errors: dict[int, RequestError] = field(default_factory=dict)
    shared_lens: Int64Array | None = None  # [I]: how many prefix tokens come before each item; None: all of them
    items_field: str = "items"  # the request's name for the items, for errors
    overrides: Overrides | None = None  # the vectors of tokens whose id is below 0

    def take(self, items: Int64Array) -> Prompt:
        """The prompt of these items only."""
        if len(items) == len(self.sequences):
            return self
        shared_lens = None if self.shared_lens is None else self.shared_lens[items]
        return replace(self, sequences=self.sequences.take(items), shared_lens=shared_lens)

    def context_lens(self) -> Int64Array:
        """[I]: how many tokens the model sees for each item."""
        return self.sequences.lens + self._lens_before()

    def context(self, item: int) -> Int32Array:
        """All tokens that the model sees for one item."""
        ids = np.concatenate([self.prefix_ids[: self._lens_before()[item]], self.sequences[item]])
        return ids if self.overrides is None else self.overrides.original_ids(ids)

    def _lens_before(self) -> Int64Array:
        if self.joined:
            return np.zeros(len(self.sequences), np.int64)
        return np.full(len(self.sequences), len(self.prefix_ids)) if self.shared_lens is None else self.shared_lens


@dataclass(frozen=True)
class _Parts:
    """The parts of a request as token ids."""

    query: Int32Array
    items: Ragged
    suffix: Int32Array
    leading: Int32Array


def build_prompt(request: ScoreRequest, tokenizer: TextTokenizer | None, delimiter: int | None) -> Prompt:
    """Tokenizes the request and arranges the tokens.

    Raises RequestError if the tokens are not legal, TokenizerError if there is text and no tokenizer.
    """
    request = _bound_texts(request, tokenizer)
    parts = _tokenize(request, tokenizer)
    _check_query(parts.query, delimiter)
    item_errors = dict(request.item_errors)
    if delimiter is not None:
        _check_delimiter(request, parts, delimiter, item_errors)
    num_sent = len(parts.query) + len(parts.items.flat)
    query, items, overrides = override_tokens(request, parts.query, parts.items, item_errors)
    items, truncated = _truncate(items, request.max_tokens_per_item)
    parts = replace(parts, query=query, items=items)
    if request.tokenization == "joint" and request.is_text and delimiter is None:
        if overrides is not None:
            raise _joint_overrides()
        prefix_ids, sequences, joined = _arrange_joint(request, _require(tokenizer), parts, truncated)
    else:
        prefix_ids, sequences, joined = _arrange_separate(request, parts, delimiter)
    return Prompt(
        prefix_ids=prefix_ids,
        sequences=sequences,
        joined=joined,
        label_ids=_label_ids(request, tokenizer),
        prompt_tokens=num_sent,
        truncated=truncated,
        item_errors=item_errors,
        overrides=overrides,
    )


def build_prefix(query: str | Int32Array, tokenizer: TextTokenizer | None, delimiter: int | None) -> Int32Array:
    """The prefix of all requests with this query (except `item_first`). Raises like `build_prompt`."""
    leading = _NOTHING
    if isinstance(query, str):
        tokenizer = _require(tokenizer)
        tokenizer.check_len(query, Place("query", "query"))
        query, leading = tokenizer.encode(query), tokenizer.leading_ids
    _check_query(query, delimiter)
    between = _NOTHING if delimiter is None else np.asarray([delimiter], np.int32)
    return np.concatenate([leading, query, between])


def without_text(request: ScoreRequest, tokenizer: TextTokenizer | None) -> ScoreRequest:
    """The same request with the token ids of its texts, which the tokenizer's special tokens do not precede."""
    if not request.is_text:
        return request
    request = _bound_texts(request, tokenizer)
    parts = _tokenize(request, tokenizer)
    suffix = None if request.suffix is None else parts.suffix
    return replace(request, query=parts.query, items=parts.items, suffix=suffix)


def _bound_texts(request: ScoreRequest, tokenizer: TextTokenizer | None) -> ScoreRequest:
    """The request without texts that are far too long for the model. Such an item is cut if items may be cut; else it
    is an error, as is any other text. Most of them are known by their number of characters."""
    if request.label_token_ids is None:
        for index, label in enumerate(request.labels or ()):
            _require(tokenizer).check_len(label, Place(f"labels[{index}]", "labels"))
    if not isinstance(request.query, str):
        return request
    tokenizer = _require(tokenizer)
    tokenizer.check_len(request.query, Place("query", "query"))
    if isinstance(request.suffix, str):
        tokenizer.check_len(request.suffix, Place("suffix", "suffix"))
    assert isinstance(request.items, tuple), "a text query comes with text items"
    if max(map(len, request.items)) <= LONG_CHARS:
        return request
    items, errors = list(request.items), dict(request.item_errors)
    for index, item in enumerate(items):
        try:
            items[index] = _bound_item(item, index, request.max_tokens_per_item, tokenizer)
        except RequestError as error:
            if request.on_item_error == "fail":
                raise
            items[index] = ""
            errors.setdefault(index, error)
    return replace(request, items=tuple(items), item_errors=errors)


def _bound_item(item: str, index: int, max_tokens: int | None, tokenizer: TextTokenizer) -> str:
    if max_tokens is not None:
        return tokenizer.shortened(item, Place.of_item(index), min(max_tokens, tokenizer.max_context_len))
    tokenizer.check_len(item, Place.of_item(index))
    return item


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
    return _Parts(request.query, request.items, suffix, _NOTHING)  # token ids are used as they are, without BOS


def _require(tokenizer: TextTokenizer | None) -> TextTokenizer:
    if tokenizer is None:
        raise TokenizerError("this model has no tokenizer, so text cannot be scored; send token ids instead")
    return tokenizer


def _truncate(items: Ragged, max_tokens: int | None) -> tuple[Ragged, tuple[Truncation, ...]]:
    """Cuts the ends of long items, and lists them."""
    if max_tokens is None:
        return items, ()
    cut = np.flatnonzero(items.lens > max_tokens)
    report = tuple(Truncation(int(i), int(items.lens[i]), max_tokens) for i in cut)
    kept_lens = np.minimum(items.lens, max_tokens)
    return Ragged(items.flat[ranges(items.starts[:-1], kept_lens)], starts_from_lens(kept_lens)), report


def _arrange_separate(request: ScoreRequest, parts: _Parts, delimiter: int | None) -> tuple[Int32Array, Ragged, bool]:
    """Prefix, sequences, and whether the sequences are whole."""
    between = _NOTHING if delimiter is None else np.asarray([delimiter], np.int32)
    if request.item_first:
        after = np.concatenate([between, parts.query, parts.suffix])
        check_token_count(len(parts.items.flat) + len(parts.items) * (len(parts.leading) + len(after)))
        return _NOTHING, surround(parts.leading, parts.items, after), True
    prefix = np.concatenate([parts.leading, parts.query, between])
    check_token_count(len(parts.items.flat) + len(parts.items) * len(parts.suffix))
    return prefix, surround(_NOTHING, parts.items, parts.suffix), False


def _arrange_joint(
    request: ScoreRequest, tokenizer: TextTokenizer, parts: _Parts, truncated: tuple[Truncation, ...]
) -> tuple[Int32Array, Ragged, bool]:
    """The same. Items that are too long are cut first, at their own tokens."""
    assert isinstance(request.query, str), "ids have no text to join"
    assert isinstance(request.items, tuple), "a text query comes with text items"
    check_token_count(len(parts.items.flat) + len(parts.items) * (len(parts.query) + len(parts.suffix)))
    items = list(request.items)
    for cut in truncated:
        items[cut.index] = tokenizer.cut(items[cut.index], cut.kept_tokens)
    query, item_first = request.query, request.item_first
    whole = tokenizer.encode_many(items, after=query) if item_first else tokenizer.encode_many(items, before=query)
    prefix = _NOTHING if item_first else np.concatenate([parts.leading, parts.query])
    return prefix, surround(parts.leading, whole, parts.suffix), True


def surround(before: Int32Array, sequences: Ragged, after: Int32Array) -> Ragged:
    """Every sequence with the same ids before and after it."""
    if not len(before) and not len(after):
        return sequences
    lens = sequences.lens + (len(before) + len(after))
    starts = starts_from_lens(lens)
    flat = np.empty(int(starts[-1]), np.int32)
    flat[ranges(starts[:-1] + len(before), sequences.lens)] = sequences.flat
    flat[starts[:-1, None] + np.arange(len(before))] = before
    flat[starts[1:, None] - len(after) + np.arange(len(after))] = after
    return Ragged(flat, starts)


def _label_ids(request: ScoreRequest, tokenizer: TextTokenizer | None) -> tuple[tuple[int, ...], ...]:
    if request.label_token_ids is not None:
        return request.label_token_ids
    assert request.labels is not None, "a request has labels as text or as token ids"
    tokenizer = _require(tokenizer)
    if request.label_scoring == "single":
        return tuple((tokenizer.label_id(label, i),) for i, label in enumerate(request.labels))
    return tuple(tokenizer.label_sequence(label, i) for i, label in enumerate(request.labels))


_SPACE_AFTER = frozenset(":.,;!?)")  # beside letters and digits: models write a space after them


def space_warnings(request: ScoreRequest, tokenizer: TextTokenizer | None) -> tuple[str, ...]:
    """Labels without the space that a model writes before them. The first ones are named."""
    before = _text_before_labels(request)
    return () if tokenizer is None else missing_space_warnings(request.labels or (), before, tokenizer, "labels")


def missing_space_warnings(labels: Sequence[str], before: str, tokenizer: TextTokenizer, field: str) -> tuple[str, ...]:
    """Of labels after the text `before`: after `Sentiment:` comes ` positive`, another token than `positive`, which
    has next to no probability there. `field`: the request's name for the labels."""
    if not (before[-1:].isalnum() or before[-1:] in _SPACE_AFTER):
        return ()
    warnings = (
        f"{field}[{place}] is {quote(label)} without a space, after text that ends in {quote(before[-1])}: a model "
        f"hardly writes it there; you may mean {quote(' ' + label)}"
        for place, label in enumerate(labels)
        if _is_written_with_space(label, tokenizer)
    )
    return tuple(islice(warnings, MAX_WARNINGS))


def _text_before_labels(request: ScoreRequest) -> str:
    """The text before the label of the first item that is not empty; "" for token ids."""
    if request.label_token_ids is not None or not isinstance(request.query, str):
        return ""
    if request.suffix:
        return str(request.suffix)
    return request.query if request.item_first else next((str(item) for item in request.items if item), request.query)


def _is_written_with_space(label: str, tokenizer: TextTokenizer) -> bool:
    """Whether the label with a space before it is another token, or begins with another. (Some tokenizers add one.)"""
    if not (label[0].isascii() and label[0].isalnum()):
        return False
    bare, spaced = tokenizer.encode(label), tokenizer.encode(" " + label)
    return 0 < len(spaced) <= len(bare) and bool(spaced[0] != bare[0])


def _joint_overrides() -> InvalidValueError:
    message = (
        'embedding overrides need tokenization "separate", got "joint": tokens across the border of query and item '
        "belong to neither"
    )
    return InvalidValueError(message, code="conflicting_parameters", param="tokenization")


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


# Limits of the model


def check_limits(prompt: Prompt, model: ModelConfig, *, label_tokens: int, report: bool) -> dict[int, RequestError]:
    """The errors of items that are too long or have unknown tokens. Raises the first one unless `report`.

    The contract has checked the ids that a caller sent; a tokenizer may still have tokens that the model lacks.
    `label_tokens`: how many tokens of a label the model sees too (all except the last of the longest label).
    """
    _check_common_tokens(prompt, model.vocab_size)
    errors: dict[int, RequestError] = {}
    for item, error in _item_errors(prompt, model, label_tokens):
        if item in prompt.item_errors or item in errors:
            continue
        if not report:
            raise error
        errors[item] = error
    return errors


def _check_common_tokens(prompt: Prompt, vocab_size: int) -> None:
    unknown = prompt.prefix_ids[prompt.prefix_ids >= vocab_size]
    if len(unknown):
        raise _unknown_token("query", "query", int(unknown[0]), vocab_size, None)
    for number, label in enumerate(prompt.label_ids):
        if max(label) >= vocab_size:
            raise _unknown_token(f"labels[{number}]", "labels", max(label), vocab_size, None)


def _item_errors(prompt: Prompt, model: ModelConfig, label_tokens: int) -> Iterator[tuple[int, RequestError]]:
    needed = prompt.context_lens() + label_tokens
    for item in (needed > model.max_context_len).nonzero()[0].tolist():
        yield item, _too_long(prompt, item, model.max_context_len, label_tokens)
    sequences = prompt.sequences
    for position in (sequences.flat >= model.vocab_size).nonzero()[0].tolist():
        item = int(np.searchsorted(sequences.starts, position, side="right")) - 1
        token = int(sequences.flat[position])
        name = prompt.items_field
        yield item, _unknown_token(f"{name}[{item}]", name, token, model.vocab_size, item)


def _too_long(prompt: Prompt, item: int, max_context_len: int, label_tokens: int) -> InvalidValueError:
    own = int(prompt.sequences.lens[item])
    parts = f"{own} tokens" if prompt.joined else f"prefix {len(prompt.prefix_ids)} + item {own} tokens"
    labels = f" + label {label_tokens}" if label_tokens else ""
    no_item_fits = len(prompt.prefix_ids) + label_tokens > max_context_len
    name = prompt.items_field
    limit = "truncate_prompt_tokens" if name == "input" else "max_tokens_per_item"
    advice = "shorten the query" if no_item_fits else f"shorten it or set {limit}"
    return InvalidValueError(
        f"{name}[{item}] must fit the model's {max_context_len} tokens, got {parts}{labels}; {advice}",
        code="context_too_long",
        param=name,
        item_index=item,
    )


def _unknown_token(where: str, param: str, token: int, vocab_size: int, item: int | None) -> VocabularyError:
    return VocabularyError(
        f"{where} must hold tokens below {vocab_size}, the model's vocabulary size, "
        f"got a text that its tokenizer gives token {token}",
        code="token_id_exceeds_vocab",
        param=param,
        item_index=item,
    )
