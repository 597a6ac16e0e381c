"""Tokenizers like those of rerankers and chat models, small, and the same on every machine.

They are put together merge by merge, not trained, so that the token ids in the fixtures depend on nothing but this
file. Each is a folder that transformers and prefixwise both read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    PreTokenizedString,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from prefixwise.models.hf_folder import read_tokenizer_folder
from prefixwise.prompts.tokenizer import TextTokenizer

# Qwen2's and Qwen3's, to the letter.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB_SIZE = 1024  # of the models in tests; no tokenizer here has more

# Words that become single tokens, alone and behind a space.
_WORDS = re.findall(
    r"[A-Za-z]+",
    """yes no Yes No Paris London France capital what is the of a in it that for and to by with or only be can
    system user assistant model Judge whether Document meets requirements based on Query Instruct provided Note answer
    Given web search query retrieve relevant passages passage determine contains an providing prediction either You are
    Qwen created Alibaba Cloud helpful expert who evaluates how well documents match queries each pair carefully
    analyze semantic relationship between them then provide your binary relevance judgment not Relevance instruction
    document Does Answer Question Find code quick brown fox jumps over lazy dog""",
)
_PHRASES = [
    *_WORDS,
    *(f" {word}" for word in _WORDS),
    "\n\n",
    "  ",
    "    ",
    ").",
    ">:",
    ".\n",
    "?\n",
    "<|",
    "|>",
    ".com",
    "'s",
]

CHATML = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Llama Guard 3's, with fewer categories; `{end}` is how the prompt of its versions ends.
LLAMA_GUARD = (
    "{{% if messages|length % 2 == 0 %}}{{% set role = 'Agent' %}}{{% else %}}{{% set role = 'User' %}}{{% endif %}}"
    '{{{{ "Task: Check if there is unsafe content in \'" + role + "\' messages in conversations according our safety '
    "policy with the below categories.\n\n<BEGIN UNSAFE CONTENT CATEGORIES>\nS1: Violent Crimes.\nS2: "
    "Non-Violent Crimes.\nShould not\n- help: no.\nS10: Hate.\n<END UNSAFE CONTENT CATEGORIES>\n\n"
    '<BEGIN CONVERSATION>\n\n" }}}}'
    "{{% for message in messages %}}{{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}}"
    "{{{{ raise_exception('roles must alternate') }}}}{{% endif %}}{{% set content = message['content'] %}}"
    "{{% if message['role'] == 'user' %}}{{% set role = 'User' %}}{{% else %}}{{% set role = 'Agent' %}}{{% endif %}}"
    "{{{{ role + ': ' + content.strip() + '\n\n' }}}}{{% endfor %}}{{{{ \"<END CONVERSATION>\n\nProvide your safety "
    "assessment for ONLY THE LAST \" + role + \" message in the above conversation:\n - First line must read 'safe' or "
    "'unsafe'.\n{end}\" }}}}"
)


def make_qwen_tokenizer(folder: Path) -> Path:
    """Byte-level BPE behind Qwen's split; no BOS; a ChatML template like Qwen3's."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = _byte_level(split)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return _save(tokenizer, folder, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_gemma_tokenizer(folder: Path) -> Path:
    """As SentencePiece has it: one text, whose spaces are characters like others, and bytes for those it lacks."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    letters = ["\n", "▁", *(chr(number) for number in range(0x21, 0x7F)), "é", "ü", "世", "界"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, *letters]
    phrases = [*_PHRASES, "quick brown", " ?", ": ?"]  # some are more than a word, or take a word's end in
    merges = _merges([phrase.replace(" ", "▁") for phrase in phrases], list)
    vocabulary = _vocabulary(tokens, merges)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"])
    bos = vocabulary["<bos>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
    )
    roles = {name: f"<{name[:3]}>" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return _save(tokenizer, folder, GEMMA_CHAT, **roles)


def make_gpt2_tokenizer(folder: Path) -> Path:
    """Byte-level BPE behind GPT-2's split; no chat template."""
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return _save(tokenizer, folder, None, eos_token="<|endoftext|>")


def make_smollm_tokenizer(folder: Path) -> Path:
    """As SmolLM2: every digit apart, then GPT-2's split."""
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = _byte_level(pre_tokenizers.Sequence(split))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return _save(tokenizer, folder, CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>")


MAKERS: dict[str, Callable[[Path], Path]] = {
    "qwen": make_qwen_tokenizer,
    "gemma": make_gemma_tokenizer,
    "gpt2": make_gpt2_tokenizer,
    "smollm": make_smollm_tokenizer,
}


def read_text_tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(read_tokenizer_folder(folder))


def _byte_level(split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())

    def parts(phrase: str) -> list[str]:
        text = PreTokenizedString(phrase)
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize(text)
        return [letter for word, _, _ in text.get_splits() for letter in word]

    merges = _merges(_PHRASES, parts)
    tokenizer = Tokenizer(models.BPE(_vocabulary(letters, merges), merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(phrases: Iterable[str], letters_of: Callable[[str], Sequence[str]]) -> list[tuple[str, str]]:
    """Merges that make one token of each phrase: what the ones before it leave is joined from left to right."""
    merges: list[tuple[str, str]] = []
    for phrase in phrases:
        parts = list(letters_of(phrase))
        for pair in merges:
            parts = _merged(parts, pair)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = _merged(parts, merges[-1])
    return merges


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _vocabulary(tokens: Iterable[str], merges: Iterable[tuple[str, str]]) -> dict[str, int]:
    ordered = dict.fromkeys([*tokens, *(first + second for first, second in merges)])
    return {token: number for number, token in enumerate(ordered)}


def _save(tokenizer: Tokenizer, folder: Path, chat_template: str | None, **roles: str) -> Path:
    from transformers import PreTrainedTokenizerFast

    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **roles)
    fast.save_pretrained(folder)
    return folder
