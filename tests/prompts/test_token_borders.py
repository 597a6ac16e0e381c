"""Where a text may be cut: whatever follows, the tokens of the two parts are those of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from prefixwise.prompts.token_borders import TokenBorders
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.reranker_tokenizers import QWEN_SPLIT

SPLITTING = ("qwen", "gpt2", "smollm")
LEADS = (
    "<Instruct>: Find it\n<Query>: what is the capital of France?\n<Document>: ",
    "A: is it\nB: ",
    "query: 1 + 1\ndocument: ",
    "world of 世界 and 🙂: ",
)

# What the splits make a difference of: blanks, digits, contractions, marks, letters of all kinds, special tokens.
PIECES = st.sampled_from([
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "1", "23", "'", "'s", "'LL", "e", "\u0301", "é", "Paris", " Paris", ".com",
    "世界", "🙂", "👍🏽", "ก\u0e33", "\u1112\u1161", "\u11ab", "<", "|", "<|im_", "<|im_end|>", "<think>", ">:",
    "?!", "_",
])  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)
PLAIN_TEXTS = TEXTS.filter(lambda text: "<" not in text and "|" not in text)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_cut(tokenizer: TextTokenizer, lead: str, text: str) -> None:
    fixed, rows = tokenizer.encode_behind(lead, [text])
    assert [*fixed.tolist(), *rows[0].tolist()] == tokenizer.encode(lead + text).tolist()


@pytest.mark.parametrize("name", SPLITTING)
@quick
@given(lead=st.sampled_from(LEADS) | st.tuples(PLAIN_TEXTS, st.sampled_from(LEADS)).map("".join), text=TEXTS)
@example(lead=LEADS[0], text="")
@example(lead=LEADS[0], text="\n \n")
@example(lead=LEADS[0], text="\u0301")
def test_behind_words_like_a_profiles_a_text_gets_the_tokens_of_the_whole(
    name: str, lead: str, text: str, text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    check_cut(text_tokenizer(name), lead, text)


@pytest.mark.parametrize("name", SPLITTING)
@quick
@given(lead=PLAIN_TEXTS, text=TEXTS)
@example(lead="a b c ", text="")
@example(lead="a b it'", text="s")
@example(lead="a b e", text="\u0301")
@example(lead="a b \n ", text="\n")
@example(lead="<|im_end", text="|>")
@example(lead="1 2 <thin", text="k>")
@example(lead="a  1", text="")
@example(lead="a  1 x y", text="")
@example(lead="Query: x\n\nDocument", text="")
@example(lead="Query: x\n\nDocument: ", text="")
def test_behind_any_words_a_text_gets_the_tokens_of_the_whole(
    name: str, lead: str, text: str, text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    check_cut(text_tokenizer(name), lead, text)


@pytest.mark.parametrize("name", SPLITTING)
@quick
@given(lead=TEXTS, text=TEXTS)
@example(lead="<think>.com", text="")
@example(lead="<think>.com a b", text="")
@example(lead="<|im_end|>'s a b", text="")
@example(lead="<|endoftext|>'s a b", text="")
def test_special_tokens_in_the_words_before_change_nothing(
    name: str, lead: str, text: str, text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    check_cut(text_tokenizer(name), lead, text)


@pytest.mark.parametrize("name", SPLITTING)
@pytest.mark.parametrize("lead", LEADS)
def test_ordinary_words_can_be_cut(name: str, lead: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    tokenizer = text_tokenizer(name)
    fixed, rows = tokenizer.encode_behind(lead, [""])
    assert len(fixed) > 0
    assert len(rows[0]) <= 12  # tokens that every document tokenizes again


def test_a_long_query_is_not_tokenized_again_for_every_document(
    text_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    fixed, rows = text_tokenizer("qwen").encode_behind(f"<Query>: {'Paris ' * 1000}\n<Document>: ", ["x", "y"])
    assert len(fixed) > 1000
    assert max(rows.lens) < 10


@pytest.mark.parametrize("lead", LEADS)
def test_merges_across_words_leave_no_safe_cut(lead: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    tokenizer = text_tokenizer("gemma")
    fixed, rows = tokenizer.encode_behind(lead, ["Paris"])
    assert len(fixed) == 0
    assert rows[0].tolist() == tokenizer.encode(lead + "Paris").tolist()


@pytest.mark.parametrize("lead", ["", "a", "a b", " \n  "])
def test_few_words_are_left_alone(lead: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    fixed, _ = text_tokenizer("qwen").encode_behind(lead, ["x"])
    assert len(fixed) == 0


def borders(**parts: object) -> TokenBorders:
    tokenizer = Tokenizer(models.BPE({"a": 0, " ": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return TokenBorders(tokenizer)


WORDS = "a a a a a a"


def test_a_known_tokenizer_has_safe_cuts() -> None:
    assert borders().last_safe_cut(WORDS) == len("a a a")
    assert borders(normalizer=normalizers.NFC()).last_safe_cut(WORDS) > 0


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "isolated")},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(QWEN_SPLIT), "removed")},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(r"(?<=a) "), "isolated")},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(r"\ba"), "isolated")},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(r"^a"), "isolated")},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
        {"model": models.WordLevel({"a": 0, " ": 1}, "a")},
    ],
    ids=lambda parts: " ".join(f"{name} {type(part).__name__}" for name, part in parts.items()),
)
def test_what_is_not_known_to_be_local_has_none(parts: dict[str, object]) -> None:
    assert borders(**parts).last_safe_cut(WORDS) == 0


def test_a_text_that_the_normalizer_changes_is_not_cut() -> None:
    nfc = borders(normalizer=normalizers.NFC())
    assert nfc.last_safe_cut("e\u0301 a a a a") == 0
    assert nfc.last_safe_cut("é a a a a") > 0


@pytest.mark.parametrize("lead", ["a a [a a a]", "a a [a a a", "a a a [a a", "[a a a] a a a a"])
def test_no_cut_falls_into_an_added_token(lead: str) -> None:
    """It may stand in the words, or be completed by what follows them."""
    tokenizer = Tokenizer(models.BPE({"a": 0, " ": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(["[a a a]"])
    begin = lead.index("[")
    assert TokenBorders(tokenizer).last_safe_cut(lead) not in range(begin + 1, begin + len("[a a a]"))


def test_a_split_that_looks_far_ahead_is_not_trusted() -> None:
    """Here one more digit at the end moves every group of three."""
    tokenizer = Tokenizer(models.BPE())
    far, near = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}", r"\p{N}{1,3}|\s+(?!\S)|\P{N}"
    for pattern, is_safe in ((far, False), (near, True)):
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        assert (TokenBorders(tokenizer).last_safe_cut("x 111222333444") > 0) == is_safe
