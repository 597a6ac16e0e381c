"""Text to token ids: what a tokenizer file says beside its vocabulary must not change a text's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from prefixwise.contract.errors import RequestError
from prefixwise.models.tokenizer_files import TokenizerFiles
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.checkpoints import add_tokenizer
from tests.prompts.merging_tokenizer import merging_tokenizer


@pytest.fixture(scope="module")
def raw_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a byte-level BPE tokenizer that puts `<s>` before every text."""
    return add_tokenizer(tmp_path_factory.mktemp("tokenizer"), bos=True) / "tokenizer.json"


@pytest.fixture(scope="module")
def byte_level(raw_tokenizer: Path) -> TextTokenizer:
    tokenizer = Tokenizer.from_file(str(raw_tokenizer))
    return TextTokenizer(TokenizerFiles(tokenizer, (0,), None, frozenset()))


def test_no_special_token_is_added_to_a_text(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode("the dog").tolist()
    assert 0 not in ids
    assert "".join(map(byte_level.decode_token, ids)) == "the dog"
    assert byte_level.leading_ids.tolist() == [0]


def test_many_texts_are_encoded_like_each_alone(byte_level: TextTokenizer) -> None:
    texts = ["", "the quick brown fox", "naïve 🙂", "a"]
    rows = byte_level.encode_many(texts)
    assert [row.tolist() for row in rows] == [byte_level.encode(text).tolist() for text in texts]


def test_padding_and_truncation_of_the_file_are_ignored(raw_tokenizer: Path, byte_level: TextTokenizer) -> None:
    """Some files still hold the settings of their training; padding would let an item see its neighbours."""
    tokenizer = Tokenizer.from_file(str(raw_tokenizer))
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(max_length=2)
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    assert len(tokenizer.encode("x").ids) == 32
    texts = ["a", "the quick brown fox jumps over the lazy dog"]
    rows = TextTokenizer(TokenizerFiles(tokenizer, (), None, frozenset())).encode_many(texts)
    assert [row.tolist() for row in rows] == [byte_level.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("text", ["the quick brown fox", "ab  cd", "naïve café", "a🚀b", "🚀🚀"])
def test_a_cut_keeps_at_most_so_many_tokens_and_is_the_beginning(byte_level: TextTokenizer, text: str) -> None:
    num_tokens = len(byte_level.encode(text))
    for max_tokens in range(1, num_tokens):
        cut = byte_level.cut(text, max_tokens)
        assert text.startswith(cut)
        assert len(byte_level.encode(cut)) <= max_tokens
    assert byte_level.cut(text, num_tokens) == text


def test_a_cut_never_keeps_half_a_character(byte_level: TextTokenizer) -> None:
    """A rocket is three tokens here, and each of them says that it spans the whole character."""
    assert len(byte_level.encode("🚀")) == 3
    assert [byte_level.cut("a🚀b", max_tokens) for max_tokens in range(1, 6)] == [
        "a",
        "a",
        "a",
        "a🚀",
        "a🚀b",
    ]


def test_a_label_of_one_token_is_its_id() -> None:
    assert merging_tokenizer().label_id("abc", 0) == 7


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("abx", "labels[3] must be exactly one token, got 'abx' which is 2: 'ab' (5), 'x' (4)"),
        ("?", "is 0: none"),
    ],
)
def test_a_label_of_another_length_is_an_error_that_shows_its_tokens(label: str, shown: str) -> None:
    with pytest.raises(RequestError) as caught:
        merging_tokenizer().label_id(label, 3)
    error = caught.value
    assert (error.code, error.status, error.param) == ("label_not_single_token", 400, "labels")
    assert error.type == "invalid_value_error"
    assert shown in error.message
    assert 'label_scoring: "sequence"' in error.message


def test_a_label_sequence_is_all_its_tokens() -> None:
    assert merging_tokenizer().label_sequence("abx", 0) == (5, 4)
    assert merging_tokenizer().label_sequence("a", 0) == (1,)


def test_a_label_sequence_has_at_least_one_token() -> None:
    with pytest.raises(RequestError, match=r"labels\[1\] must hold at least one token, got '\?'") as caught:
        merging_tokenizer().label_sequence("?", 1)
    assert (caught.value.code, caught.value.param) == ("empty_label_token_ids", "labels")
