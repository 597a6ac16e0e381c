"""From text to token ids: a model's tokenizer, and the places where a text can be cut.

The library takes 60 to 300 bytes of memory for each character, and `encode` holds the interpreter lock. So a long text
goes through `encode_batch_fast`, which releases the lock, many texts go in batches of bounded size, and a text
that is far too long for the model is refused or cut by its characters (`text_bounds.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixwise.contract.cancellation import check_cancelled
from prefixwise.contract.checks import MAX_TOKENS_PER_REQUEST, check_token_count
from prefixwise.contract.errors import InternalError, InvalidValueError
from prefixwise.contract.inputs import Place
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.contract.request import TruncationSide
from prefixwise.models.checkpoint import TokenizerFiles, is_failure
from prefixwise.prompts.text_bounds import max_chars_per_token, steps

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

MAX_TEXT_CHARS = 1 << 22  # of one text, however long tokens are: 60 bytes of memory each, and 200 for each token
_CHARS_THAT_FIT = 6  # for each token that the model takes, where that is more
LONG_CHARS = 1 << 18  # a longer text is looked at before it is tokenized; also the characters of a batch
_SHORT_CHARS = 1 << 12  # `encode` takes up to 5 ms for so many
_PIECE_CHARS = 1 << 16  # of a long text, whose tokens are counted at once
_BATCH_TEXTS = 1 << 12
_FAR_MORE = 2  # times as many tokens: a text in pieces has a few more tokens than as a whole, never so many
_SHOWN_TOKENS = 8  # of a label, in an error message
_SHOWN_CHARS = 60


class TextTokenizer:
    """A model's tokenizer. It adds no special tokens: `leading_ids` (BOS) start a prompt.

    `max_context_len`: tokens that the model takes; texts that are far too long for it are not tokenized.
    """

    def __init__(self, files: TokenizerFiles, max_context_len: int = 1 << 20) -> None:
        self._tokenizer = files.tokenizer
        self.max_context_len = max_context_len
        self._chars_per_token = max_chars_per_token(files.tokenizer)
        # A tokenizer may have both switched on, as in training: they would change texts without a warning.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.leading_ids = np.asarray(files.leading_ids, np.int32)
        self.trailing_ids = np.asarray(files.trailing_ids, np.int32)  # of texts that are classified or embedded
        self.chat_template = files.chat_template
        self.special_tokens = files.special_tokens
        self.special_ids = files.special_ids
        self._borders: TokenBorders | None = None
        self._anchor: tuple[Int32Array, int] | None = None  # a token, and the characters of its text
        self._token_texts: dict[int, str] = {}

    def encode(self, text: str) -> Int32Array:
        if len(text) > _SHORT_CHARS:
            return self.encode_many([text]).flat
        check_cancelled()
        with _panics_as_errors():
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_many(self, texts: Sequence[str], *, before: str = "", after: str = "") -> Ragged:
        """The tokens of each `before + text + after`. Raises too_many_tokens if there are too many for one request."""
        parts: list[Ragged] = []
        num_tokens = 0
        for batch in _batches(texts, len(before) + len(after)):
            whole = [before + text + after for text in batch] if before or after else batch
            parts.append(Ragged.from_sequences([encoding.ids for encoding in self._encodings(whole)]))
            num_tokens += len(parts[-1].flat)
            check_token_count(num_tokens)
        return parts[0] if len(parts) == 1 else Ragged.concatenated(parts)

    def encode_after(self, lead: str, texts: Sequence[str], after: str = "") -> tuple[Int32Array, Ragged]:
        """The tokens of `lead + text + after` for each text: first those that all of them share, then the rest of each.

        The shared tokens depend on the lead alone: they are its tokens up to the last safe cut.
        """
        if self._borders is None:
            self._borders = TokenBorders(self._tokenizer)
        with _panics_as_errors():
            cut = self._borders.last_safe_cut(lead)
        rest = lead[cut:]
        if len(rest) * len(texts) > MAX_TOKENS_PER_REQUEST:
            check_token_count(len(self.encode(rest)) * len(texts), "query")
        return self.encode(lead[:cut]), self.encode_many(texts, before=rest, after=after)

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """Without offsets. Other threads run meanwhile."""
        check_cancelled()
        with _panics_as_errors():
            encodings: list[Encoding] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return encodings

    def check_len(self, text: str, place: Place, max_tokens: int | None = None) -> None:
        """Raises context_too_long for a text with far more than `max_tokens` tokens, most often without tokenizing it.

        A text of up to LONG_CHARS characters passes: its tokens are counted. None: the tokens that the model takes.
        """
        longest = self.max_context_len if max_tokens is None else max_tokens
        if len(text) <= LONG_CHARS:
            return
        if len(text) > self._max_chars(longest) or self._excess_len(text, longest, "right") is not None:
            raise self._too_long(text, place, longest)

    def shortened(self, text: str, place: Place, max_tokens: int, side: TruncationSide = "right") -> str:
        """The text, or of one with far more than `max_tokens` tokens a part that still has far more: its beginning, or
        its end where `side`, the end that is cut off, is left. What a request keeps lies far from this cut.

        Raises context_too_long if no such part is found in as many characters as are tokenized.
        """
        if len(text) <= LONG_CHARS:
            return text
        most = self._max_chars(2 * _FAR_MORE * max_tokens)
        part = text[-most:] if side == "left" else text[:most]
        size = self._excess_len(part, max_tokens, side)
        if size is None and len(part) < len(text):
            raise self._too_long(text, place, max_tokens)
        return part if size is None else part[-size:] if side == "left" else part[:size]

    def _too_long(self, text: str, place: Place, max_tokens: int) -> InvalidValueError:
        return InvalidValueError(
            f"{place.name} must have at most {max_tokens} tokens, got a text of {len(text)} characters, which are far "
            "too many; shorten it",
            code="context_too_long",
            param=place.param,
            item_index=place.item_index,
        )

    def _max_chars(self, max_tokens: int) -> int:
        """No longer text has so few tokens, or it is longer than any text that is tokenized."""
        most = max(MAX_TEXT_CHARS, self.max_context_len * _CHARS_THAT_FIT)
        return max(LONG_CHARS, min(max_tokens * self._chars_per_token, most))

    def _excess_len(self, text: str, max_tokens: int, side: TruncationSide) -> int | None:
        """How many characters have far more tokens, counted piece by piece; None if not even all of them have."""
        num_tokens = 0
        for size in range(0, len(text), _PIECE_CHARS):
            end = len(text) - size
            piece = text[max(0, end - _PIECE_CHARS) : end] if side == "left" else text[size : size + _PIECE_CHARS]
            num_tokens += len(self._encodings([piece])[0])
            if num_tokens > _FAR_MORE * max_tokens:
                return size + len(piece)
        return None

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, None if there is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def decode_token(self, token_id: int) -> str:
        """One token as text."""
        with _panics_as_errors():
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def decode(self, token_ids: Int32Array) -> str:
        """Tokens as text, special ones too."""
        with _panics_as_errors():
            text: str = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """What a token adds to a text: decoded behind another one, as some decoders strip a blank at the beginning."""
        if token_id not in self._token_texts:
            if self._anchor is None:
                ids = self.encode("a")[-1:]
                self._anchor = ids, len(self.decode(ids))
            ids, num_chars = self._anchor
            self._token_texts[token_id] = self.decode(np.append(ids, np.int32(token_id)))[num_chars:]
        return self._token_texts[token_id]

    def cut(self, text: str, max_tokens: int) -> str:
        """The text of the first `max_tokens` tokens, without a last character that is cut in two."""
        with _panics_as_errors():
            if len(text) > _SHORT_CHARS:
                offsets = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].offsets
            else:
                offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= max_tokens:
            return text
        # All tokens of a character span it: the first token that is cut may begin before the end of the last one.
        return text[: min(offsets[max_tokens - 1][1], offsets[max_tokens][0])]

    def label_id(self, label: str, position: int) -> int:
        """The token id of a label that is one token. Raises InvalidValueError, which shows its tokens."""
        ids = self.encode(label)
        if len(ids) == 1:
            return int(ids[0])
        tokens = ", ".join(f"{self.decode_token(int(i))!r} ({i})" for i in ids[:_SHOWN_TOKENS]) or "none"
        tokens += ", ..." if len(ids) > _SHOWN_TOKENS else ""
        raise InvalidValueError(
            f"labels[{position}] must be exactly one token, got {_shown(label)} which is {len(ids)}: {tokens}; "
            'use another label, or label_scoring: "sequence"',
            code="label_not_single_token",
            param="labels",
        )

    def label_sequence(self, label: str, position: int) -> tuple[int, ...]:
        """All tokens of a label. Raises InvalidValueError if it has none."""
        ids = self.encode(label)
        if not len(ids):
            message = f"labels[{position}] must hold at least one token, got {_shown(label)} which has none"
            raise InvalidValueError(message, code="empty_label_token_ids", param="labels")
        return tuple(int(i) for i in ids)


def _shown(label: str) -> str:
    return repr(label) if len(label) <= _SHOWN_CHARS else f"{label[:_SHOWN_CHARS]!r}..."


def _batches(texts: Sequence[str], added: int) -> Iterator[Sequence[str]]:
    """Consecutive texts, so many that the library's memory for them is bounded. `added`: characters to each of them."""
    first = size = 0
    for index, text in enumerate(texts):
        size += len(text) + added
        if size > LONG_CHARS or index - first == _BATCH_TEXTS:
            if index > first:
                yield texts[first:index]
            first, size = index, len(text) + added
    if first < len(texts):
        yield texts[first:]


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic of the library, which is Rust, is no Exception in Python: it would end the thread that it happens in."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise InternalError(f"the model's tokenizer fails on this text: {error}") from None


# Where a text can be cut
#
# A document is tokenized together with the text before it, as rerankers are trained: `<Document>: ` and `Paris` give
# ` Paris`. The text before it holds the query, which may be long, and would be tokenized again for every document.
# Byte-level tokenizers first split a text by a regular expression, from left to right and without looking back, and
# then work within each part. So all parts except the last ones do not depend on the text that follows.

_WINDOW_CHARS = 1 << 13  # of a long text; the library holds the interpreter lock while it splits one
_MAX_WINDOW_CHARS = 1 << 15
_OPEN_PARTS = 3  # the last part may grow with the text that follows; two more to be safe
_MOST_TRIED = 8  # cuts
_HARMLESS_LOOK_AHEAD = r"(?!\S)"  # looks at one character, at the end of blanks


class TokenBorders:
    """Finds places where a text can be cut so that its tokens stay the same, whatever text follows it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._splits_locally = _splits_locally(tokenizer)
        self._added = _AddedTokens([token.content for token in tokenizer.get_added_tokens_decoder().values()])

    def last_safe_cut(self, text: str) -> int:
        """The largest position c that is known to be safe: for every x the tokens of text + x are those of text[:c]
        and of text[c:] + x. 0 if none is known.

        A long text is cut window by window: the text behind a safe cut is a text of its own.
        """
        start, size = 0, _WINDOW_CHARS
        while len(text) - start > size:
            cut = self._last_cut(text[start : start + size])
            if cut == 0 and size == _MAX_WINDOW_CHARS:
                return start
            size = _WINDOW_CHARS if cut else 2 * size
            start += cut
        return start + self._last_cut(text[start:])

    def _last_cut(self, text: str) -> int:
        """The parts do not show added tokens, and blanks at the end of text[:c] do not see the text after them, so the
        tokens of the text itself are compared too."""
        if not self._splits_locally or self._is_changed(text):
            return 0
        parts = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        whole = self._ids(text)
        for _, (cut, _) in reversed(parts[1 : 1 - _OPEN_PARTS][-_MOST_TRIED:]):
            if self._is_safe(text, cut) and self._ids(text[:cut]) + self._ids(text[cut:]) == whole:
                return int(cut)
        return 0

    def _is_safe(self, text: str, cut: int) -> bool:
        return bool(text[cut:].strip()) and not self._added.may_straddle(text, cut)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _is_changed(self, text: str) -> bool:
        normalizer = self._tokenizer.normalizer
        return normalizer is not None and normalizer.normalize_str(text) != text


class _AddedTokens:
    """Tokens that a tokenizer finds before it splits a text. There may be a thousand, so one regular expression finds
    all of them."""

    def __init__(self, contents: Sequence[str]) -> None:
        longest_first = sorted(filter(None, contents), key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._any = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = frozenset(token[:end] for token in longest_first for end in range(1, len(token)))

    def may_straddle(self, text: str, cut: int) -> bool:
        """Whether an added token could begin before the cut and end after it, here or in the text that follows."""
        first = max(0, cut - self._longest + 1)
        return any(self._ends_behind(text, at, cut) or text[at:] in self._beginnings for at in range(first, cut))

    def _ends_behind(self, text: str, at: int, cut: int) -> bool:
        found = None if self._any is None else self._any.match(text, at)
        return found is not None and found.end() > cut


def _splits_locally(tokenizer: Tokenizer) -> bool:
    """True for known kinds: BPE after splits by regular expressions, and no normalizer except NFC."""
    if type(tokenizer.model).__name__ != "BPE" or any(step["type"] != "NFC" for step in steps(tokenizer.normalizer)):
        return False
    splitting = steps(tokenizer.pre_tokenizer)
    return all(map(_is_local, splitting)) and any(map(_splits, splitting))


def _is_local(step: Mapping[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return not bool(step["add_prefix_space"])
    if step["type"] == "Split":
        pattern: str | None = step["pattern"].get("Regex")
        return pattern is not None and step["behavior"] == "Isolated" and not _looks_around(pattern)
    return bool(step["type"] == "Digits")


def _looks_around(pattern: str) -> bool:
    rest = pattern.replace("[^", "[").replace(_HARMLESS_LOOK_AHEAD, "")
    return any(each in rest for each in ("(?<", "(?=", "(?!", "^", r"\A", r"\b", r"\B", r"\G"))


def _splits(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Split" or bool(step.get("use_regex"))
