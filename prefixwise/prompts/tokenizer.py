"""Text to token ids, the same way for every algorithm and backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.models.tokenizer_files import TokenizerFiles
from prefixwise.prompts.token_borders import TokenBorders


class TextTokenizer:
    """A model's tokenizer. It adds no special tokens: `leading_ids` (BOS) start a prompt."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        # A tokenizer.json may ask for both, as it was trained: they would cut and lengthen texts in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.leading_ids = np.asarray(files.leading_ids, np.int32)
        self.chat_template = files.chat_template
        self.special_tokens = files.special_tokens
        self.special_ids = files.special_ids
        self._borders: TokenBorders | None = None

    def encode(self, text: str) -> Int32Array:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_many(self, texts: Sequence[str]) -> Ragged:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return Ragged.from_rows([encoding.ids for encoding in encodings])

    def encode_behind(self, lead: str, texts: Sequence[str]) -> tuple[Int32Array, Ragged]:
        """The tokens of `lead + text` for each text: those that are the lead's whatever follows, and each text's rest.

        The first part depends on the lead alone, and is as long as is known without a look at the texts.
        """
        if self._borders is None:
            self._borders = TokenBorders(self._tokenizer)
        cut = self._borders.last_safe_cut(lead)
        return self.encode(lead[:cut]), self.encode_many([lead[cut:] + text for text in texts])

    def token_id(self, token: str) -> int | None:
        """The id of one token of the vocabulary, None where it has none like this."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def decode_token(self, token_id: int) -> str:
        """One token as people read it."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def cut(self, text: str, max_tokens: int) -> str:
        """The text's first `max_tokens` tokens, as text, without a last character that is cut in two."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= max_tokens:
            return text
        # Every token of a character spans it: the first one left out may begin before the last one kept.
        return text[: min(offsets[max_tokens - 1][1], offsets[max_tokens][0])]

    def label_id(self, label: str, position: int) -> int:
        """The single token that a label string is, or an error that shows its tokens."""
        ids = self.encode(label)
        if len(ids) == 1:
            return int(ids[0])
        tokens = ", ".join(f"{self.decode_token(int(i))!r} ({i})" for i in ids) or "none"
        raise InvalidValueError(
            f"labels[{position}] must be exactly one token, got {label!r} which is {len(ids)}: {tokens}; "
            'use another label, or label_scoring: "sequence"',
            code="label_not_single_token",
            param="labels",
        )

    def label_sequence(self, label: str, position: int) -> tuple[int, ...]:
        """All tokens of a label string; at least one."""
        ids = self.encode(label)
        if not len(ids):
            message = f"labels[{position}] must hold at least one token, got {label!r} which has none"
            raise InvalidValueError(message, code="empty_label_token_ids", param="labels")
        return tuple(int(i) for i in ids)
