"""What a checkpoint says about its tokenizer, whatever its file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TokenizerFiles:
    """A ready tokenizer and the facts that it does not carry itself."""

    tokenizer: Tokenizer
    leading_ids: tuple[int, ...]  # special tokens that stand before every prompt (BOS), usually none or one
    chat_template: str | None
    special_ids: frozenset[int]
    # Their texts by role, where known: bos_token, eos_token, unk_token, pad_token. Chat templates ask for them.
    special_tokens: Mapping[str, str] = field(default_factory=dict)
