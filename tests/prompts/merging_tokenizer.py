"""A tokenizer small enough to follow by hand, whose tokens merge across the border between query and item."""

from __future__ import annotations

from prefixwise.models.checkpoint import TokenizerFiles
from prefixwise.prompts.tokenizer import TextTokenizer

# Letters are tokens, `ab`, `bc` and `abc` are merged; any other character has no token at all.
VOCABULARY = {"<s>": 0, "a": 1, "b": 2, "c": 3, "x": 4, "ab": 5, "bc": 6, "abc": 7, "y": 8, "z": 9}
MERGES = [("a", "b"), ("b", "c"), ("ab", "c")]
BOS = 0
CHAT_TEMPLATE = (  # x before each message and z behind it; y begins the answer
    "{% for each in messages %}x{{ each.content }}{% if not loop.last or add_generation_prompt %}z{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}y{% endif %}"
)


def merging_tokenizer(*, bos: bool = False, chat_template: str | None = None) -> TextTokenizer:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE(VOCABULARY, MERGES))
    return TextTokenizer(TokenizerFiles(tokenizer, (BOS,) if bos else (), chat_template, frozenset({BOS})))


def token_texts(ids: list[int]) -> str:
    """The text that these tokens stand for."""
    names = {number: text for text, number in VOCABULARY.items()}
    return "".join(names[number] for number in ids)
