"""Text to token ids: what a tokenizer file says beside its vocabulary must not change a text's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from prefixwise.contract.errors import RequestError, TokenizerError
from prefixwise.models.checkpoint import TokenizerFiles
from prefixwise.prompts.chat_places import ChatFrame, chat_frame
from prefixwise.prompts.tokenizer import TextTokenizer, TokenBorders
from tests.checkpoints import add_tokenizer
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.prompts.reranker_tokenizers import CHATML, GEMMA_CHAT, QWEN_SPLIT


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


# Where a text may be cut: whatever follows, the tokens of the two parts are those of the whole


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
    fixed, rows = tokenizer.encode_after(lead, [text])
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
    fixed, rows = tokenizer.encode_after(lead, [""])
    assert len(fixed) > 0
    assert len(rows[0]) <= 12  # tokens that every document tokenizes again


def test_a_long_query_is_not_tokenized_again_for_every_document(
    text_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    fixed, rows = text_tokenizer("qwen").encode_after(f"<Query>: {'Paris ' * 1000}\n<Document>: ", ["x", "y"])
    assert len(fixed) > 1000
    assert max(rows.lens) < 10


@pytest.mark.parametrize("lead", LEADS)
def test_merges_across_words_leave_no_safe_cut(lead: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    tokenizer = text_tokenizer("gemma")
    fixed, rows = tokenizer.encode_after(lead, ["Paris"])
    assert len(fixed) == 0
    assert rows[0].tolist() == tokenizer.encode(lead + "Paris").tolist()


@pytest.mark.parametrize("lead", ["", "a", "a b", " \n  "])
def test_few_words_are_left_alone(lead: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    fixed, _ = text_tokenizer("qwen").encode_after(lead, ["x"])
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


# A checkpoint's chat template: what it writes around a message, and what it is not allowed to do


SHOW = "{{ messages[0].content }}"
LLAMA_DATE = (
    "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date = '26 Jul 2024' %}{%- endif %}Today: {{ date }}\n" + SHOW
)


def test_the_frame_is_what_stands_around_the_message() -> None:
    assert chat_frame(f"<s>{SHOW}</s>\n<a>", {}) == ChatFrame("<s>", "</s>\n<a>", trims=False)


def test_a_template_that_trims_is_known() -> None:
    assert chat_frame("[{{ messages[0].content | trim }}]", {}) == ChatFrame("[", "]", trims=True)
    assert chat_frame("[ {{ messages[0].content }} \n]", {}) == ChatFrame("[ ", " \n]", trims=False)


def test_the_answer_begins_at_once() -> None:
    """It is asked for, and no thinking before it."""
    frame = chat_frame(CHATML, {})
    before, after = frame.before, frame.after
    assert before == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    assert after == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_special_tokens_are_given_by_their_roles() -> None:
    frame = chat_frame(GEMMA_CHAT, {"bos_token": "<bos>"})
    before, after = frame.before, frame.after
    assert (before, after) == ("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n")
    assert chat_frame(GEMMA_CHAT, {}).before == "<start_of_turn>user\n"


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (CHATML, {}),
        (GEMMA_CHAT, {"bos_token": "<bos>"}),
        ("{% for m in messages %}\n    {% if loop.first %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n", {}),
        ("{% for m in messages %}[{{ m['content'] | trim }}]{% if loop.first %}{% break %}{% endif %}{% endfor %}", {}),
        ("{{ {'é': messages[0].role} | tojson }} {{ messages[0]['content'] }}\n\n", {}),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ messages[-1].content }}", {}),
        ("{% macro show(m) %}<{{ m.content }}>{% endmacro %}{{ show(messages[0]) }}", {}),
        ("{{ messages[0].get('name', 'nobody') }}: {{ messages[0].content }}", {}),
        ("{% if tools is not none %}Tools: {{ tools }}\n{% endif %}" + SHOW, {}),
    ],
    ids=["chatml", "gemma", "trimmed blocks", "break", "tojson", "namespace", "macro", "methods", "no tools"],
)
def test_the_frame_is_what_transformers_writes(template: str, special: dict[str, str]) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **special
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "my words"}], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    frame = chat_frame(template, special)
    assert frame.before + "my words" + frame.after == text


def test_it_is_always_the_same_day() -> None:
    """Scores must not change overnight."""
    assert chat_frame(LLAMA_DATE, {}).before == "Today: 26 Jul 2024\n"
    assert chat_frame("{{ strftime_now('%Y-%m-%d') }}" + SHOW, {}).before == "2024-07-26"


def test_what_an_assistant_says_may_be_marked() -> None:
    template = "<{% generation %}[" + SHOW + "]{% endgeneration %}>"
    assert chat_frame(template, {}) == ChatFrame("<[", "]>", trims=False)


@pytest.mark.parametrize("shown", [0, 2, 3])
def test_a_message_must_be_shown_once(shown: int) -> None:
    with pytest.raises(TokenizerError, match=f"must show a message once, got {shown} times"):
        chat_frame(f"a {SHOW * shown} b", {})


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'config.json' %}",
        "{% import 'os' as os %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ '{0.__class__.__mro__[1]}'.format(1) }}",
    ],
)
def test_a_template_can_write_text_and_nothing_else(attempt: str) -> None:
    with pytest.raises(TokenizerError, match=r"the checkpoint's chat template fails: ."):
        chat_frame(attempt + SHOW, {})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only system messages, please') }}", "only system messages, please"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content | nosuchfilter }}", "nosuchfilter"),
        ("{{ unknown.attribute }}", "'unknown' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 'a'.index('b') }}", "not found"),
    ],
)
def test_a_template_that_fails_is_one_error(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match="the checkpoint's chat template fails: ") as caught:
        chat_frame(template, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'x' * 2000000 }}",
    ],
    ids=["loops", "a huge text", "a text that doubles", "more than a prompt"],
)
def test_a_template_cannot_take_the_machine(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixwise.models.chat_template.MAX_CPU_SECONDS", 1)
    with pytest.raises(
        TokenizerError, match=r"the checkpoint's chat template fails: (it does not end|it writes|Memory)"
    ):
        chat_frame(bomb + SHOW, {})


def test_a_template_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "once " + SHOW
    assert chat_frame(template, {}).before == "once "
    monkeypatch.setattr("prefixwise.prompts.chat_places.render_chat_template", None)
    assert chat_frame(template, {}).before == "once "


def test_a_panic_in_the_library_is_an_error_of_the_request(raw_tokenizer: Path) -> None:
    """It is no Exception, and would end the thread that tokenizes."""
    from tokenizers import Tokenizer

    class PanicException(BaseException):
        pass

    class Panics:
        def __init__(self) -> None:
            self.whole = Tokenizer.from_file(str(raw_tokenizer))

        def encode(self, *_: Any, **__: Any) -> None:
            raise PanicException("index out of bounds")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.whole, name)

    tokenizer = TextTokenizer(TokenizerFiles(Panics(), (), None, frozenset()))  # type: ignore[arg-type]
    for use in (
        lambda: tokenizer.encode("a"),
        lambda: tokenizer.cut("a", 1),
        lambda: tokenizer.encode_after("a b", ["c"]),
    ):
        with pytest.raises(RequestError, match="the model's tokenizer fails on this text: index out of bounds"):
            use()


def test_a_template_without_end_is_one_error() -> None:
    with pytest.raises(TokenizerError, match="the checkpoint's chat template fails: "):
        chat_frame("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}" + SHOW, {})
