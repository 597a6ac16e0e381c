"""Texts that are far too long for the model: what their characters say before they are tokenized, and where they are
cut. The bounds are made small here, so that texts stay short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from prefixwise.contract.cancellation import cancellable, check_cancelled
from prefixwise.contract.checks import MAX_TOKENS_PER_REQUEST
from prefixwise.contract.errors import CancelledError, InvalidValueError, RequestError
from prefixwise.contract.inputs import Place
from prefixwise.contract.parse import parse_score_request
from prefixwise.models.checkpoint import TokenizerFiles
from prefixwise.prompts import tokenizer as module
from prefixwise.prompts.template import build_prefix, build_prompt, without_text
from prefixwise.prompts.text_bounds import LOOSE_CHARS_PER_TOKEN, max_chars_per_token
from prefixwise.prompts.tokenizer import MAX_TEXT_CHARS, TextTokenizer
from tests.prompts.reranker_tokenizers import MAKERS, QWEN_SPLIT

BYTES = {symbol: number for number, symbol in enumerate(pre_tokenizers.ByteLevel.alphabet())}
QUERY = Place("query", "query")


def byte_level(**parts: Any) -> Tokenizer:
    vocabulary = {**BYTES, "ab": 300, "abab": 301}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def text_tokenizer_of(tokenizer: Tokenizer, max_context_len: int) -> TextTokenizer:
    return TextTokenizer(TokenizerFiles(tokenizer, (), None, frozenset()), max_context_len)


# Characters of a token


def test_the_longest_token_bounds_the_characters_of_a_token() -> None:
    assert max_chars_per_token(byte_level()) == len("abab")
    assert max_chars_per_token(byte_level(normalizer=normalizers.NFC())) == 4 * len("abab")


def test_an_added_token_counts() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert max_chars_per_token(tokenizer) == len("<|endoftext|>")


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Replace("aa", "a")},
        {"normalizer": normalizers.Replace(Regex(" +"), "a")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(QWEN_SPLIT), "removed")},
        {"pre_tokenizer": None},  # most characters have no token
        {"model": models.BPE({"a": 0}, [])},
        {"model": models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True), "pre_tokenizer": None},
        {"model": models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")},
        {"model": models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)},
    ],
    ids=lambda parts: " ".join(f"{name} {type(part).__name__}" for name, part in parts.items()),
)
def test_a_tokenizer_that_may_drop_text_has_a_fixed_bound(parts: dict[str, Any]) -> None:
    assert max_chars_per_token(byte_level(**parts)) >= LOOSE_CHARS_PER_TOKEN


def test_so_has_one_whose_added_tokens_take_the_blanks_beside_them() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True)])
    assert max_chars_per_token(tokenizer) == LOOSE_CHARS_PER_TOKEN


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40) | st.text("ab e\u0301\u1112\u1161\u11ab<|im_end|> ", max_size=80))
def test_no_text_has_fewer_tokens_than_the_bound_says(
    name: str, text: str, text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    tokenizer = text_tokenizer(name)
    assert len(tokenizer.encode(text)) * tokenizer._chars_per_token >= len(text)


# Texts that are too long


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chars = 0
        self.most = 0  # at once

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        return self.encode_batch_fast([text], **options)[0]

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.chars += sum(map(len, texts))
        self.most = max(self.most, sum(map(len, texts)))
        return self.tokenizer.encode_batch(texts, **options)

    encode_batch = encode_batch_fast


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LONG_CHARS", 64), ("_PIECE_CHARS", 16), ("_SHORT_CHARS", 8), ("_BATCH_TEXTS", 4)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("prefixwise.prompts.template.LONG_CHARS", 64)


@pytest.fixture
def counting(small_bounds: None) -> tuple[TextTokenizer, Counting]:
    """A model of 20 tokens, each of 4 characters at most."""
    counted = Counting(byte_level())
    return text_tokenizer_of(counted, 20), counted  # type: ignore[arg-type]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(counting: tuple[TextTokenizer, Counting]) -> None:
    tokenizer, counted = counting
    with pytest.raises(InvalidValueError, match=r"^query must have at most 20 tokens, got a text of 81 char") as caught:
        tokenizer.check_len("abab" * 20 + "a", QUERY)
    assert (caught.value.code, caught.value.param) == ("context_too_long", "query")
    assert counted.chars == 0


def test_one_that_may_fit_is_counted_in_pieces_until_it_is_far_too_long(
    counting: tuple[TextTokenizer, Counting],
) -> None:
    tokenizer, counted = counting
    tokenizer.check_len("abab" * 20, QUERY)  # 20 tokens
    tokenizer.check_len("x" * 40, QUERY)  # short: its tokens are counted when it is tokenized
    before = counted.chars
    with pytest.raises(InvalidValueError):
        tokenizer.check_len("x" * 80, QUERY)
    assert counted.chars - before == 48  # twice the 20 tokens, and the rest of a piece
    assert counted.most == 16


def test_a_text_is_bounded_also_where_few_tokens_may_be_long() -> None:
    counted = Counting(byte_level(normalizer=normalizers.Strip()))
    tokenizer = text_tokenizer_of(counted, 1 << 18)  # type: ignore[arg-type]
    assert (1 << 18) * LOOSE_CHARS_PER_TOKEN > MAX_TEXT_CHARS
    with pytest.raises(InvalidValueError, match="far too many"):
        tokenizer.check_len("a" * (MAX_TEXT_CHARS + 1), QUERY)
    assert counted.chars == 0


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_a_text_is_cut_far_behind_the_tokens_that_are_kept(
    counting: tuple[TextTokenizer, Counting], max_tokens: int
) -> None:
    tokenizer, counted = counting
    text = "".join(f"{number} ab " for number in range(500))
    whole = tokenizer.encode(text).tolist()
    counted.chars = 0
    for side, kept in (("right", whole[:max_tokens]), ("left", whole[-max_tokens:])):
        part = tokenizer.shortened(text, QUERY, max_tokens, side)  # type: ignore[arg-type]
        ids = tokenizer.encode(part).tolist()
        assert len(part) < 150 < len(text)
        assert text.startswith(part) if side == "right" else text.endswith(part)
        assert (ids[:max_tokens] if side == "right" else ids[-max_tokens:]) == kept
    assert counted.chars < 600


def test_what_is_short_enough_is_not_cut(counting: tuple[TextTokenizer, Counting]) -> None:
    tokenizer, _ = counting
    for text in ("x" * 64, "abab" * 20):
        assert tokenizer.shortened(text, QUERY, 20) == text


def test_a_text_whose_tokens_vanish_is_not_cut_in_silence(small_bounds: None) -> None:
    """It may have few tokens, and yet be longer than anything that is tokenized."""
    tokenizer = text_tokenizer_of(byte_level(normalizer=normalizers.Replace(" ", "")), 4)
    with pytest.raises(InvalidValueError, match="far too many"):
        tokenizer.shortened(" " * 5000, QUERY, 4)


def test_many_texts_go_in_batches_of_bounded_size(counting: tuple[TextTokenizer, Counting]) -> None:
    tokenizer, counted = counting
    texts = ["ab" * (number % 20) for number in range(50)] + ["", "x" * 100, "", "a"]
    rows = tokenizer.encode_many(texts, before="b", after="a")
    assert counted.most <= 102
    whole = byte_level().encode_batch([f"b{text}a" for text in texts])
    assert [row.tolist() for row in rows] == [each.ids for each in whole]
    assert len(tokenizer.encode_many([])) == 0


def test_a_request_ends_when_nobody_waits_for_it(counting: tuple[TextTokenizer, Counting]) -> None:
    tokenizer, counted = counting
    with cancellable(lambda: counted.chars > 500), pytest.raises(CancelledError):
        tokenizer.encode_many(["ab" * 30] * 1000)
    assert counted.chars < 700
    check_cancelled()  # outside of the block: nothing


# Requests


def prompt_of(tokenizer: TextTokenizer, **fields: Any) -> Any:
    return build_prompt(
        parse_score_request({"query": "a", "items": ["b"], "label_token_ids": [1], **fields}), tokenizer, None
    )


@pytest.mark.parametrize(
    ("fields", "param", "index"),
    [
        ({"query": "x" * 200}, "query", None),
        ({"suffix": "x" * 200}, "suffix", None),
        ({"items": ["a", "x" * 200]}, "items", 1),
        ({"labels": ["a", "x" * 200], "label_token_ids": None}, "labels", None),
        ({"labels": ["x" * 200], "label_token_ids": None, "query": [1], "items": [[1]]}, "labels", None),
    ],
    ids=["query", "suffix", "items", "labels", "labels-of-ids"],
)
def test_every_text_of_a_request_is_refused(
    counting: tuple[TextTokenizer, Counting], fields: dict[str, Any], param: str, index: int | None
) -> None:
    tokenizer, counted = counting
    with pytest.raises(RequestError) as caught:
        prompt_of(tokenizer, **fields)
    assert (caught.value.code, caught.value.param, caught.value.item_index) == ("context_too_long", param, index)
    assert counted.chars == 0


def test_the_query_of_a_prefix_is_refused(counting: tuple[TextTokenizer, Counting]) -> None:
    with pytest.raises(RequestError, match="far too many"):
        build_prefix("x" * 200, counting[0], None)


def test_an_item_may_be_reported_instead(counting: tuple[TextTokenizer, Counting]) -> None:
    prompt = prompt_of(counting[0], items=["a", "x" * 200, "b"], on_item_error="report")
    assert list(prompt.item_errors) == [1]
    assert [len(row) for row in prompt.sequences] == [1, 0, 1]


def test_an_item_that_may_be_cut_is_cut_by_characters_first(counting: tuple[TextTokenizer, Counting]) -> None:
    tokenizer, counted = counting
    whole = prompt_of(text_tokenizer_of(byte_level(), 20), items=["x" * 1000], max_tokens_per_item=3)
    for tokenization in ("separate", "joint"):
        counted.chars = 0
        prompt = prompt_of(tokenizer, items=["x" * 1000], max_tokens_per_item=3, tokenization=tokenization)
        assert counted.chars < 100
        assert prompt.truncated[0].kept_tokens == 3
        assert prompt.sequences[0].tolist()[-3:] == whole.sequences[0].tolist()


def test_a_request_without_its_text_has_the_same_tokens(counting: tuple[TextTokenizer, Counting]) -> None:
    request = parse_score_request({"query": "abab", "items": ["b", ""], "label_token_ids": [1], "suffix": "ab"})
    ids = without_text(request, counting[0])
    assert not ids.is_text
    expected, prompt = build_prompt(request, counting[0], None), build_prompt(ids, None, None)
    assert prompt.prefix_ids.tolist() == expected.prefix_ids.tolist()
    assert [row.tolist() for row in prompt.sequences] == [row.tolist() for row in expected.sequences]


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "x" * 1000},
        {"query": "x" * 1000, "item_first": True},
        {"query": "x" * 1000, "tokenization": "joint"},
        {"query": [1], "items": [[]] * 10_000, "suffix": [1] * 1000},
    ],
    ids=["suffix", "item_first", "joint", "ids"],
)
def test_what_every_item_repeats_counts_for_every_item(fields: dict[str, Any]) -> None:
    assert MAX_TOKENS_PER_REQUEST < 10_000 * 1000
    tokenizer = text_tokenizer_of(byte_level(), 4096)
    with pytest.raises(RequestError, match=f"at most {MAX_TOKENS_PER_REQUEST} tokens") as caught:
        prompt_of(tokenizer, **{"items": [""] * 10_000, **fields})
    assert caught.value.code == "too_many_tokens"


def test_a_lead_without_a_safe_cut_counts_for_every_document() -> None:
    tokenizer = text_tokenizer_of(byte_level(), 4096)
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_after("x" * 1000, [""] * 10_000)
    assert caught.value.code == "too_many_tokens"


@pytest.mark.parametrize("name", ["qwen", "smollm"])
def test_a_long_lead_is_cut_window_by_window(
    name: str, text_tokenizer: Callable[[str], TextTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WINDOW_CHARS", 32)
    monkeypatch.setattr(module, "_MAX_WINDOW_CHARS", 256)
    tokenizer = text_tokenizer(name)
    for lead in ("what is the capital of France? " * 20, "a" * 200 + " b c d e", "12 345 " * 40 + "\n \n<Document>: "):
        fixed, rows = tokenizer.encode_after(lead, ["", "Paris", " 1"])
        assert len(fixed) > 0
        assert len(rows[0]) < 40
        for text, row in zip(("", "Paris", " 1"), rows, strict=True):
            assert [*fixed.tolist(), *row.tolist()] == tokenizer.encode(lead + text).tolist()
