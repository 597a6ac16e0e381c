"""Where a text can be cut without another token coming out, whatever follows it.

A document is tokenized together with the words before it, as the recipes of rerankers have it: `<Document>: ` and
`Paris` give ` Paris`. But the words before it hold the query, which may be long, and would be tokenized again for
every document. Byte-level tokenizers first split a text by a regular expression, from left to right and without
looking back, and then work within a part; so all but the last parts are what they are, whatever comes behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OPEN_PARTS = 3  # the last part may grow with what follows; two to spare
_MOST_TRIED = 8  # cuts
_HARMLESS_LOOK_AHEAD = r"(?!\S)"  # at one character, where blanks end


class TokenBorders:
    """What a tokenizer allows; the same for all texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._splits_locally = _splits_locally(tokenizer)
        self._added = _AddedTokens([token.content for token in tokenizer.get_added_tokens_decoder().values()])

    def last_safe_cut(self, text: str) -> int:
        """The largest place c that is known to be safe: for every x the tokens of text + x are those of text[:c]
        and of text[c:] + x. 0 where nothing is known.

        Parts are found as if there were no added tokens, and blanks at the end of text[:c] do not see what stands
        behind them; so the text's own tokens are compared, too."""
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
    """Tokens that are found in a text before it is split. Some tokenizers have a thousand, so they are not tried one
    by one."""

    def __init__(self, contents: Sequence[str]) -> None:
        longest_first = sorted(filter(None, contents), key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._any = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = frozenset(token[:end] for token in longest_first for end in range(1, len(token)))

    def may_straddle(self, text: str, cut: int) -> bool:
        """Could one begin before the cut and end behind it, in the text or in what follows?"""
        first = max(0, cut - self._longest + 1)
        return any(self._ends_behind(text, at, cut) or text[at:] in self._beginnings for at in range(first, cut))

    def _ends_behind(self, text: str, at: int, cut: int) -> bool:
        found = None if self._any is None else self._any.match(text, at)
        return found is not None and found.end() > cut


def _splits_locally(tokenizer: Tokenizer) -> bool:
    """True only for what is known: BPE behind splits by regular expressions, and no normalizer but NFC."""
    if type(tokenizer.model).__name__ != "BPE" or tokenizer.pre_tokenizer is None:
        return False
    if tokenizer.normalizer is not None and _state(tokenizer.normalizer)["type"] != "NFC":
        return False
    steps = list(_steps(_state(tokenizer.pre_tokenizer)))
    return all(map(_is_local, steps)) and any(map(_splits, steps))


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner: Iterable[Mapping[str, Any]] | None = state.get("pretokenizers")
    if inner is None:
        yield state
        return
    for each in inner:
        yield from _steps(each)


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
