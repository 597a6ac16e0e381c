"""A tokenizer that knows whole words, the few that the documentation's examples have."""

from __future__ import annotations

from prefixwise.models.checkpoint import TokenizerFiles
from prefixwise.prompts.tokenizer import TextTokenizer

WORDS = ("?", "Is", "this", "about", "food", "pizza", "tax", "law", "yes", "no", "1", "2", "3", "4", "5")


def word_tokenizer() -> TextTokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    chat_template = "{{ messages[0].content }}"
    return TextTokenizer(TokenizerFiles(tokenizer, (), chat_template, frozenset()))
