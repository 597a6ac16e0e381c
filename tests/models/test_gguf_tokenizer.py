from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from prefixwise.contract.errors import ModelLoadError, TokenizerError
from prefixwise.models.checkpoint import Checkpoint, TokenizerFiles
from prefixwise.models.hf_folder import read_tokenizer_folder
from prefixwise.models.sources import open_checkpoint
from tests.checkpoints import (
    TRAINING_TEXT,
    add_tokenizer,
    make_gguf,
    make_hf_checkpoint,
    quick_gguf_reader,
)
from tests.real_tokenizers import write_gguf_tokenizer

TEXTS = [
    "",
    "a",
    " ",
    "Hello world",
    " leading",
    "  two leading, two trailing  ",
    "line\n\nbreaks\r\n\r\n and\n  indents\n",
    "\ttabs\t\tand\x0bothers\x00",
    "naïve café, Straße; ﬁ Å e\u0301 ö",
    "你好世界。こんにちは",
    "привет мир, مرحبا",
    "🙂👍🏽 👨‍👩‍👧 flags 🇩🇪",
    "don't WE'LL I'm they've O'Neill's",
    "camelCase SCREAMING_CASE HTTPServer/v2//x",
    "def f(x):\n\treturn [y**2 for y in x if y != 0]  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|>x<|im_start", "a\u00a0b\u200bc\u3000d",
    "x" * 200,
    '{"a": [1.5, -2e10, true]}',
]  # fmt: skip
DIGITS = [
    "2024",
    "1,234,567.89",
    "in 1999 and 3000",
    "  42",
    "v1.2.3-rc4",
    "½ ² Ⅷ ٣٤ 12½",
    "0x1F",
    "room 101's",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GPT2_BYTES = pre_tokenizers.ByteLevel.alphabet()


def ids_of(files: TokenizerFiles, text: str) -> list[int]:
    ids: list[int] = files.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def tokens_of(files: TokenizerFiles, text: str) -> list[str]:
    tokens: list[str] = files.tokenizer.encode(text, add_special_tokens=False).tokens
    return tokens


def trained_byte_level(*splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=GPT2_BYTES, show_progress=False
    )
    tokenizer.train_from_iterator([TRAINING_TEXT, *TEXTS, *DIGITS] * 3, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }


def transformers_mapping() -> Any:
    """What transformers knows of GGUF's tokenizers."""
    name = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    return pytest.importorskip(name, reason="transformers is too old")


def transformers_split(name: str) -> list[pre_tokenizers.PreTokenizer]:
    pattern = Regex(transformers_mapping().GGUF_PRE_TOKENIZER_SPLITS[name])
    return [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [GPT2_SPLIT],
    "default": [GPT2_SPLIT],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT],
}


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_a_trained_byte_level_tokenizer_comes_back(pre: str, tmp_path: Path) -> None:
    tokenizer = trained_byte_level(*(SPLITS.get(pre) or transformers_split(pre)))
    if pre in ("llama-bpe", "tekken"):
        tokenizer.model.ignore_merges = True
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    files = write_gguf_tokenizer(tmp_path / "model.gguf", byte_level_metadata(tokenizer, pre))
    for text in TEXTS + DIGITS:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids_of(files, text) == expected, text
        if pre != "qwen2":  # which composes accents
            assert files.tokenizer.decode(expected, skip_special_tokens=False) == text


def test_the_split_rules_differ_where_they_should(tmp_path: Path) -> None:
    """Digits one by one, in threes, or all together: no rule stands in for another."""
    pieces = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"):
        metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), pre)
        split = write_gguf_tokenizer(tmp_path / f"{pre}.gguf", metadata).tokenizer.pre_tokenizer
        pieces[pre] = [piece for piece, _ in split.pre_tokenize_str("iPhone 12345 a/\n")]
    assert pieces["gpt-2"] == ["iPhone", "Ġ12345", "Ġa", "/", "Ċ"]
    assert pieces["smollm"] == ["iPhone", "Ġ", "1", "2", "3", "4", "5", "Ġa", "/", "Ċ"]
    assert pieces["qwen2"] == ["iPhone", "Ġ", "1", "2", "3", "4", "5", "Ġa", "/Ċ"]
    assert pieces["llama-bpe"] == ["iPhone", "Ġ", "123", "45", "Ġa", "/Ċ"]
    assert pieces["tekken"] == ["i", "Phone", "Ġ", "1", "2", "3", "4", "5", "Ġa", "/Ċ"]


def test_llama3_takes_a_piece_that_is_a_token_as_it_is(tmp_path: Path) -> None:
    """Its vocabulary has tokens that no merges lead to."""
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "llama-bpe")
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "zqzq"]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], 1]
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
    assert ids_of(files, "zqzq") == [len(metadata["ggml.tokens"]) - 1]


@pytest.fixture(scope="module")
def embedded_tokenizer() -> TokenizerFiles:
    return open_checkpoint().read_tokenizer_files()


@pytest.fixture(scope="module")
def transformers_tokenizer(embedded_path: Path) -> Any:
    pytest.importorskip("torch")  # transformers reads GGUF files with it
    from transformers import AutoTokenizer

    with quick_gguf_reader():
        return AutoTokenizer.from_pretrained(embedded_path.parent, gguf_file=embedded_path.name)


def test_the_embedded_tokenizer_is_that_of_transformers(
    embedded_tokenizer: TokenizerFiles, transformers_tokenizer: Any
) -> None:
    for text in [*TEXTS, "2024", "v1.2.3-rc4", "in 1999 and 3000", "<|endoftext|><repo_name>x<file_sep>"]:
        expected = transformers_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids_of(embedded_tokenizer, text) == expected, text


def test_the_embedded_tokenizer_splits_digits_as_smollm2_does(
    embedded_tokenizer: TokenizerFiles, transformers_tokenizer: Any
) -> None:
    """transformers reads `smollm` as GPT-2's rule, which glues spaces and signs to digits that SmolLM2's own
    tokenizer.json sets apart; with that one rule put right, it agrees on every number."""
    backend = Tokenizer.from_str(transformers_tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(SPLITS["smollm"])
    for text in DIGITS + TEXTS:
        assert ids_of(embedded_tokenizer, text) == backend.encode(text, add_special_tokens=False).ids, text


def test_embedded_texts_come_back(embedded_tokenizer: TokenizerFiles) -> None:
    for text in TEXTS + DIGITS:
        ids = ids_of(embedded_tokenizer, text)
        assert embedded_tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_embedded_tokenizer_has_its_template_and_no_bos(embedded_tokenizer: TokenizerFiles) -> None:
    assert embedded_tokenizer.leading_ids == ()
    assert embedded_tokenizer.special_ids == frozenset(range(17))
    assert embedded_tokenizer.chat_template is not None
    assert "<|im_start|>" in embedded_tokenizer.chat_template


# A SentencePiece model: pieces with scores, the later learned the lower.


def sentencepiece_metadata(vocab_size: int = 700) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 259, show_progress=False)
    tokenizer.train_from_iterator([TRAINING_TEXT] * 3, trainer)
    learned = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    control = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": control + byte_tokens + learned,
        "ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(learned))],
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(learned),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def greedy_sentencepiece(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """SentencePiece's BPE at its plainest: join the two neighbours whose union scores best, until none do."""
    ids = {token: index for index, token in enumerate(tokens)}
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not unions:
            break
        place = -max(unions)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    bytes_of = {piece: [ids[f"<0x{byte:02X}>"] for byte in piece.encode()] for piece in pieces if piece not in ids}
    return [index for piece in pieces for index in bytes_of.get(piece) or [ids[piece]]]


PLAIN_TEXTS = [text for text in TEXTS + DIGITS if "<|" not in text]


def test_sentencepiece_joins_what_scores_best(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
    for text in PLAIN_TEXTS:
        expected = greedy_sentencepiece(text, metadata["ggml.tokens"], metadata["ggml.scores"])
        assert ids_of(files, text) == expected, text
        assert files.tokenizer.decode(expected, skip_special_tokens=False) == text


def test_sentencepiece_agrees_with_transformers(tmp_path: Path) -> None:
    convert_gguf_tokenizer = transformers_mapping().convert_gguf_tokenizer
    metadata = sentencepiece_metadata()
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
    described = {key.removeprefix("ggml."): value for key, value in metadata.items()} | {"tokenizer_type": "llama"}
    backend, _ = convert_gguf_tokenizer("llama", described)
    for text in PLAIN_TEXTS:
        if not text.startswith(" "):  # transformers adds no space where there is one; SentencePiece does
            assert ids_of(files, text) == backend.encode(text, add_special_tokens=False).ids, text


def test_gemma_joins_what_comes_first_in_its_vocabulary(tmp_path: Path) -> None:
    """As transformers has it: the scores of Gemma's tokens are of no use."""
    convert_gguf_tokenizer = transformers_mapping().convert_gguf_tokenizer
    metadata = sentencepiece_metadata() | {"ggml.add_space_prefix": False}
    metadata["ggml.tokens"] = ["<pad>", "<eos>", "<bos>", "<unk>", *metadata["ggml.tokens"][3:]]
    metadata["ggml.token_type"] = [3, 3, 3, 2, *metadata["ggml.token_type"][3:]]
    metadata["ggml.scores"] = [-1000.0] * len(metadata["ggml.tokens"])
    roles = {"bos": 2, "eos": 1, "unknown": 3, "padding": 0}
    metadata |= {f"ggml.{role}_token_id": index for role, index in roles.items()}
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata, "gemma")
    described = {key.removeprefix("ggml."): value for key, value in metadata.items()} | {"tokenizer_type": "llama"}
    backend, _ = convert_gguf_tokenizer("gemma", described)
    for text in [*PLAIN_TEXTS, "the lazy dog. Is this document relevant?"]:
        assert ids_of(files, text) == backend.encode(text, add_special_tokens=False).ids, text
    assert len(ids_of(files, "the document")) < 8, "some tokens are joined"
    assert files.leading_ids == (2,)


def test_sentencepiece_puts_a_space_before_text_and_after_special_tokens(tmp_path: Path) -> None:
    files = write_gguf_tokenizer(tmp_path / "model.gguf", sentencepiece_metadata())
    assert ids_of(files, "the</s>the") == [*ids_of(files, "the"), 2, *ids_of(files, "the")]
    assert tokens_of(files, "the")[0].startswith("▁")


def test_phi3s_tokens_take_the_blanks_behind_them(tmp_path: Path) -> None:
    """As its own tokenizer.json and llama.cpp have it."""
    metadata = sentencepiece_metadata()
    first = len(metadata["ggml.tokens"])
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "<|user|>", "<|endoftext|>"]
    metadata["ggml.scores"] = [*metadata["ggml.scores"], -1000.0, -1000.0]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], 3, 3]
    phi = write_gguf_tokenizer(tmp_path / "phi.gguf", metadata, "phi3")
    llama = write_gguf_tokenizer(tmp_path / "llama.gguf", metadata, "llama")
    the = ids_of(phi, "the")
    assert ids_of(phi, "<|user|> \n the") == [first, *the] != ids_of(llama, "<|user|> \n the")
    assert ids_of(phi, "<|endoftext|> the") == ids_of(llama, "<|endoftext|> the") != [first + 1, *the]


def test_sentencepiece_without_the_space(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() | {"ggml.add_space_prefix": False}
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
    assert not tokens_of(files, "the dog")[0].startswith("▁")
    assert files.tokenizer.decode(ids_of(files, "the dog")) == "the dog"


def test_sentencepiece_finds_runs_of_spaces_that_are_tokens(tmp_path: Path) -> None:
    """Gemma's are tokens of their own kind, whose text in the file has the spaces themselves."""
    metadata = sentencepiece_metadata() | {"ggml.add_space_prefix": False}
    first = len(metadata["ggml.tokens"])
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "  ", "   ", "<start_of_turn>"]
    metadata["ggml.scores"] = [*metadata["ggml.scores"], -1000.0, -1000.0, -1000.0]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], 4, 4, 3]
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
    text = "<start_of_turn>the   dog  the"
    ids = ids_of(files, text)
    the, dog = ids_of(files, "the"), ids_of(files, "dog")
    assert ids == [first + 2, *the, first + 1, *dog, first, *the]
    assert files.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("blank", [" ", "▁"])  # as converters write them since 2024, and as they did before
@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3"])
def test_gemma_takes_the_longest_run_of_blanks_first(architecture: str, blank: str, tmp_path: Path) -> None:
    """Scores and places of these tokens, which are last in the vocabulary, do not count."""
    metadata = sentencepiece_metadata() | {"ggml.add_space_prefix": False}
    first = len(metadata["ggml.tokens"])
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], *(blank * size for size in range(2, 8))]
    metadata["ggml.scores"] = [*metadata["ggml.scores"], *[-1000.0] * 6]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], *[4] * 6]
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata, architecture)
    assert ids_of(files, " " * 17)[:3] == [first + 5, first + 5, first + 1]
    assert files.tokenizer.decode(ids_of(files, "the" + " " * 17 + "dog")) == "the" + " " * 17 + "dog"


def test_sentencepiece_spells_what_it_does_not_know_in_bytes(tmp_path: Path) -> None:
    files = write_gguf_tokenizer(tmp_path / "model.gguf", sentencepiece_metadata())
    assert tokens_of(files, "ж") == ["▁", "<0xD0>", "<0xB6>"]


# What goes with the vocabulary.


@pytest.mark.parametrize(
    ("pre", "added", "expected"),
    [
        ("gpt-2", {}, ()),
        ("qwen2", {}, ()),
        ("qwen2", {"ggml.add_bos_token": True}, (1,)),
        ("llama-bpe", {}, (1,)),
        ("tekken", {}, (1,)),
        ("llama-bpe", {"ggml.add_bos_token": False}, ()),
    ],
)
def test_bos_follows_the_file_and_then_the_kind(
    pre: str, added: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), pre) | added
    assert write_gguf_tokenizer(tmp_path / "model.gguf", metadata).leading_ids == expected


@pytest.mark.parametrize(("added", "expected"), [({}, ()), ({"ggml.add_eos_token": True}, (2,))])
def test_eos_follows_the_file(added: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    assert write_gguf_tokenizer(tmp_path / "model.gguf", sentencepiece_metadata() | added).trailing_ids == expected


@pytest.mark.parametrize(("added", "expected"), [({}, (1,)), ({"ggml.add_bos_token": False}, ())])
def test_sentencepiece_has_bos_unless_the_file_says_no(
    added: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert write_gguf_tokenizer(tmp_path / "model.gguf", sentencepiece_metadata() | added).leading_ids == expected


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "qwen2")
    think = len(metadata["ggml.tokens"])
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "<think>"]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], 4]
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
    assert files.special_ids == {0, 1, 2}
    ids = ids_of(files, "<think><|im_end|>")
    assert ids == [think, 2]
    assert files.tokenizer.decode(ids, skip_special_tokens=True) == "<think>"
    assert files.tokenizer.get_vocab_size() == think + 1


def test_bos_and_eos_are_special_where_the_file_has_no_types(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "gpt-2")
    del metadata["ggml.token_type"]
    assert write_gguf_tokenizer(tmp_path / "model.gguf", metadata).special_ids == {1, 2}


def test_special_tokens_have_their_texts(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    expected = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert write_gguf_tokenizer(tmp_path / "some.gguf", metadata).special_tokens == expected
    metadata |= {"ggml.padding_token_id": 5}
    files = write_gguf_tokenizer(tmp_path / "padding.gguf", metadata)
    assert files.special_tokens == {**expected, "pad_token": metadata["ggml.tokens"][5]}


def test_a_special_token_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "gpt-2")
    metadata |= {"ggml.padding_token_id": len(metadata["ggml.tokens"])}
    files = write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
    assert files.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_the_chat_template_is_read(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "gpt-2")
    assert write_gguf_tokenizer(tmp_path / "none.gguf", metadata).chat_template is None
    files = write_gguf_tokenizer(tmp_path / "some.gguf", metadata | {"chat_template": "{{ messages }}"})
    assert files.chat_template == "{{ messages }}"


@pytest.mark.parametrize("bos", [False, True])
def test_a_converted_folder_has_the_folders_tokenizer(bos: bool, tmp_path: Path) -> None:
    folder = add_tokenizer(make_hf_checkpoint(tmp_path / "hf", "qwen3"), bos=bos)
    expected = read_tokenizer_folder(folder)
    files = open_checkpoint(make_gguf(folder, tmp_path / "model.gguf")).read_tokenizer_files()
    assert (files.leading_ids, files.special_ids) == (expected.leading_ids, expected.special_ids)
    for text in TEXTS:
        assert ids_of(files, text) == ids_of(expected, text), text


def test_a_file_without_a_tokenizer_still_opens(gguf_files: dict[str, Path]) -> None:
    checkpoint: Checkpoint = open_checkpoint(gguf_files["llama"])
    with pytest.raises(TokenizerError, match=r"llama.gguf has no tokenizer.*send token ids instead"):
        checkpoint.read_tokenizer_files()


def test_an_unknown_split_rule_is_named_with_the_known_ones(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "jais")
    expected = (
        "unsupported pre-tokenizer 'jais'; supported: default, gpt-2, llama-bpe, .*dbrx, qwen2, refact, smollm, tekken"
    )
    with pytest.raises(TokenizerError, match=expected):
        write_gguf_tokenizer(tmp_path / "model.gguf", metadata)


def test_an_unknown_kind_is_named_with_the_known_ones(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "gpt-2") | {"ggml.model": "t5"}
    with pytest.raises(TokenizerError, match="unsupported tokenizer 't5'; supported: gpt2, llama"):
        write_gguf_tokenizer(tmp_path / "model.gguf", metadata)


def test_missing_merges_are_named(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "gpt-2")
    del metadata["ggml.merges"]
    with pytest.raises(ModelLoadError, match="its tokenizer lacks 'merges', which 'gpt2' needs"):
        write_gguf_tokenizer(tmp_path / "model.gguf", metadata)


def test_merges_that_do_not_fit_the_vocabulary_are_one_clear_error(tmp_path: Path) -> None:
    metadata = byte_level_metadata(trained_byte_level(GPT2_SPLIT), "gpt-2")
    metadata["ggml.merges"] = [*metadata["ggml.merges"], "zq qz"]
    with pytest.raises(ModelLoadError, match=r"model.gguf: its tokenizer cannot be built: "):
        write_gguf_tokenizer(tmp_path / "model.gguf", metadata)
