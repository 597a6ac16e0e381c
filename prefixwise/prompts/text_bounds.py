"""How many characters of text a token can stand for. Characters bound tokens, so a text that cannot fit the model is
refused, or cut where it would be cut anyway, before it is tokenized: tokenizing takes up to 270 bytes for each byte.

The bound holds where every character of a text is part of exactly one token: BPE over all bytes, or with one unknown
token for each unknown character, after steps that drop nothing. Other tokenizers can make one token of any number of
characters: an unknown word of WordPiece, a run of unknown characters that are fused, blanks beside an added token that
strips them. They get a fixed bound, far above the 3 to 5 characters of a token in any language.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOOSE_CHARS_PER_TOKEN = 64  # of tokenizers that may drop text; more where the vocabulary has longer tokens
_NFC_SHRINKS = 4  # NFD has at most four characters for one of NFC, and never fewer than the text (Unicode UAX 15)

_KEPT_BY_NORMALIZERS = ("NFC", "Prepend", "Replace")
_KEPT_BY_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split")


def max_chars_per_token(tokenizer: Tokenizer) -> int:
    """No token of this tokenizer stands for more characters of a text."""
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    longest = max(map(len, vocabulary), default=1)
    normalizing, splitting = steps(tokenizer.normalizer), steps(tokenizer.pre_tokenizer)
    if any(step["type"] == "NFC" for step in normalizing):
        longest *= _NFC_SHRINKS
    keeps_text = (
        all(map(_normalizer_keeps, normalizing))
        and all(map(_pre_tokenizer_keeps, splitting))
        and _model_keeps(tokenizer.model, vocabulary, splitting)
        and not any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    )
    return longest if keeps_text else max(longest, LOOSE_CHARS_PER_TOKEN)


def steps(part: Any) -> list[Mapping[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, step by step; [] for None."""
    return [] if part is None else list(_flat(json.loads(part.__getstate__())))


def _flat(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner: Iterable[Mapping[str, Any]] | None = state.get("pretokenizers", state.get("normalizers"))
    if inner is None:
        yield state
        return
    for each in inner:
        yield from _flat(each)


def _normalizer_keeps(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern: str | None = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return step["type"] in _KEPT_BY_NORMALIZERS


def _pre_tokenizer_keeps(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEPT_BY_PRE_TOKENIZERS and step.get("behavior") != "Removed"


def _model_keeps(model: Any, vocabulary: Mapping[str, int], splitting: Iterable[Mapping[str, Any]]) -> bool:
    """Every character is in some token, and in no token with any number of others."""
    if type(model).__name__ != "BPE":
        return False
    if any(step["type"] == "ByteLevel" for step in splitting):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
