"""From a request to tokens: borders, BOS, delimiter, truncation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import RequestError, TokenizerError
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.ragged import Ragged
from prefixwise.contract.result import Truncation
from prefixwise.launch.loading import read_tokenizer
from prefixwise.models.sources import open_checkpoint
from prefixwise.prompts.template import Prompt, build_prefix, build_prompt, check_limits, space_warnings, surround
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.merging_tokenizer import merging_tokenizer


def prompt_of(delimiter: int | None = None, *, bos: bool = False, **fields: Any) -> Prompt:
    is_text = isinstance(fields["query"], str)
    request = parse_score_request({"label_token_ids": [1], **fields})
    return build_prompt(request, merging_tokenizer(bos=bos) if is_text else None, delimiter)


def contexts(prompt: Prompt) -> list[list[int]]:
    """What the model sees for every item."""
    prefix = [] if prompt.joined else prompt.prefix_ids.tolist()
    return [prefix + row.tolist() for row in prompt.sequences]


class TestSeparate:
    def test_query_item_and_suffix_are_tokenized_each_on_its_own(self) -> None:
        prompt = prompt_of(query="xa", items=["b", "bc", ""], suffix="c")
        assert prompt.prefix_ids.tolist() == [4, 1]
        assert contexts(prompt) == [[4, 1, 2, 3], [4, 1, 6, 3], [4, 1, 3]]
        assert not prompt.joined

    def test_bos_stands_at_the_very_start_only(self) -> None:
        prompt = prompt_of(bos=True, query="xa", items=["b", ""], suffix="c")
        assert contexts(prompt) == [[0, 4, 1, 2, 3], [0, 4, 1, 3]]
        first = prompt_of(bos=True, query="xa", items=["b"], item_first=True)
        assert contexts(first) == [[0, 2, 4, 1]]

    def test_token_ids_are_used_as_they_are(self) -> None:
        prompt = prompt_of(query=[7, 7], items=[[1], []], suffix=[9])
        assert contexts(prompt) == [[7, 7, 1, 9], [7, 7, 9]]

    def test_item_first_puts_the_query_behind_the_item(self) -> None:
        prompt = prompt_of(query=[7, 8], items=[[1, 2], []], suffix=[9], item_first=True)
        assert contexts(prompt) == [[1, 2, 7, 8, 9], [7, 8, 9]]
        assert len(prompt.prefix_ids) == 0

    def test_the_caller_pays_for_the_query_once_and_for_every_item(self) -> None:
        assert prompt_of(5, bos=True, query="xa", items=["b", "c", ""], suffix="c").prompt_tokens == 2 + 1 + 1
        assert prompt_of(query=[1, 2, 3], items=[[4], [5, 6]]).prompt_tokens == 6

    def test_some_items_can_be_taken_out_of_a_prompt(self) -> None:
        prompt = prompt_of(query=[7], items=[[1], [2, 2], [3]])
        assert contexts(prompt.take(np.array([0, 2]))) == [[7, 1], [7, 3]]
        assert prompt.take(np.arange(3)) is prompt


class TestJoint:
    def test_query_and_item_are_one_text(self) -> None:
        """`xa` + `b` is x, ab; `xa` + `bc` is x, abc."""
        prompt = prompt_of(query="xa", items=["b", "bc", "x", ""], tokenization="joint")
        assert contexts(prompt) == [[4, 5], [4, 7], [4, 1, 4], [4, 1]]
        assert prompt.prefix_ids.tolist() == [4, 1]
        assert prompt.joined

    def test_the_suffix_keeps_its_own_border_and_bos_comes_first(self) -> None:
        prompt = prompt_of(bos=True, query="xa", items=["b"], suffix="c", tokenization="joint")
        assert contexts(prompt) == [[0, 4, 5, 3]]
        assert prompt.prefix_ids.tolist() == [0, 4, 1]

    def test_item_first_is_one_text_too(self) -> None:
        prompt = prompt_of(bos=True, query="bx", items=["a", ""], tokenization="joint", item_first=True)
        assert contexts(prompt) == [[0, 5, 4], [0, 2, 4]]
        assert len(prompt.prefix_ids) == 0

    def test_a_truncated_item_is_cut_at_its_own_tokens(self) -> None:
        prompt = prompt_of(query="xa", items=["bcxx", "b", "ab"], tokenization="joint", max_tokens_per_item=1)
        assert contexts(prompt) == [[4, 7], [4, 5], [4, 1, 5]]
        assert prompt.truncated == (Truncation(0, 3, 1),)

    def test_token_ids_have_no_text_to_join(self) -> None:
        prompt = prompt_of(query=[4, 1], items=[[2]], tokenization="joint")
        assert contexts(prompt) == [[4, 1, 2]]

    def test_a_delimiter_is_a_border(self) -> None:
        prompt = prompt_of(8, query="xa", items=["b"], tokenization="joint")
        assert contexts(prompt) == [[4, 1, 8, 2]]


class TestTruncation:
    def test_only_the_ends_of_long_items_are_cut_and_each_is_reported(self) -> None:
        prompt = prompt_of(
            query=[7] * 5, items=[[1, 2, 3], [4, 5], [6, 6, 6, 6]], suffix=[9] * 4, max_tokens_per_item=2
        )
        assert contexts(prompt) == [[*[7] * 5, *item, *[9] * 4] for item in ([1, 2], [4, 5], [6, 6])]
        assert prompt.truncated == (Truncation(0, 3, 2), Truncation(2, 4, 2))

    @pytest.mark.parametrize("limit", [None, 3])
    def test_nothing_is_cut_unasked_or_reported_untouched(self, limit: int | None) -> None:
        prompt = prompt_of(query=[7], items=[[1, 2, 3], []], max_tokens_per_item=limit)
        assert contexts(prompt) == [[7, 1, 2, 3], [7]]
        assert prompt.truncated == ()


class TestDelimiter:
    def test_it_ends_the_prefix(self) -> None:
        prompt = prompt_of(5, query=[7, 8], items=[[1], []])
        assert prompt.prefix_ids.tolist() == [7, 8, 5]
        assert contexts(prompt) == [[7, 8, 5, 1], [7, 8, 5]]

    def test_it_stands_between_item_and_query_when_the_item_is_first(self) -> None:
        assert contexts(prompt_of(5, query=[7], items=[[1]], item_first=True)) == [[1, 5, 7]]

    def test_id_0_is_a_delimiter(self) -> None:
        assert contexts(prompt_of(0, query=[7], items=[[1]])) == [[7, 0, 1]]
        with pytest.raises(RequestError, match="delimiter token 0"):
            prompt_of(0, query=[7], items=[[0]])

    def test_without_one_its_id_is_a_token_like_any_other(self) -> None:
        assert contexts(prompt_of(None, query=[0, 5], items=[[5, 0]])) == [[0, 5, 5, 0]]

    @pytest.mark.parametrize(
        ("query", "items", "message"),
        [
            ([1, 5, 5], [[1]], "query must not hold the delimiter token 5, got it at token 1"),
            (
                [1],
                [[1], [2, 3, 5], [5]],
                r"items\[1\] must not hold the delimiter token 5, got it at token 2",
            ),
            ("xab", ["c"], "query must not hold the delimiter token 5, got it at token 1"),
            ("x", ["c", "", "xab"], r"items\[2\] must not hold the delimiter token 5, got it at token 1"),
        ],
    )
    def test_inside_query_or_item_it_is_a_collision(self, query: object, items: object, message: str) -> None:
        with pytest.raises(RequestError, match=message) as caught:
            prompt_of(5, query=query, items=items)
        error = caught.value
        assert (error.code, error.status, error.type) == ("delimiter_collision", 400, "invalid_value_error")
        assert error.param == message.partition(" ")[0].partition("\\")[0]

    def test_a_report_has_one_error_per_item_and_keeps_the_others(self) -> None:
        prompt = prompt_of(5, query=[1], items=[[5, 2, 5], [3], [5]], on_item_error="report")
        assert {index: error.code for index, error in prompt.item_errors.items()} == {
            0: "delimiter_collision",
            2: "delimiter_collision",
        }
        assert "at token 0" in prompt.item_errors[0].message
        assert prompt.item_errors[2].item_index == 2

    def test_a_collision_in_the_query_cannot_be_reported_by_item(self) -> None:
        with pytest.raises(RequestError, match="query must not hold"):
            prompt_of(5, query=[5], items=[[1]], on_item_error="report")


class TestLabels:
    def test_text_labels_become_their_tokens(self) -> None:
        assert prompt_of(query="x", items=["a"], labels=["ab", "c"], label_token_ids=None).label_ids == (
            (5,),
            (3,),
        )

    def test_a_sequence_label_has_as_many_tokens_as_it_needs(self) -> None:
        prompt = prompt_of(query="x", items=["a"], labels=["abx", "c"], label_token_ids=None, label_scoring="sequence")
        assert prompt.label_ids == ((5, 4), (3,))

    def test_a_label_of_two_tokens_is_refused_otherwise(self) -> None:
        with pytest.raises(RequestError) as caught:
            prompt_of(query="x", items=["a"], labels=["c", "abx"], label_token_ids=None)
        assert caught.value.code == "label_not_single_token"
        assert "labels[1]" in caught.value.message

    def test_text_labels_go_with_ids_as_well(self) -> None:
        request = parse_score_request({"query": [1], "items": [[2]], "labels": ["ab"]})
        assert build_prompt(request, merging_tokenizer(), None).label_ids == ((5,),)


class TestPrefixAlone:
    """What can be computed before any item is known."""

    @pytest.mark.parametrize("delimiter", [None, 8])
    @pytest.mark.parametrize("bos", [False, True])
    @pytest.mark.parametrize("query", ["xa", [4, 1]])
    def test_it_is_the_prefix_of_any_request_with_this_query(
        self, query: str | list[int], bos: bool, delimiter: int | None
    ) -> None:
        asked = query if isinstance(query, str) else np.array(query, np.int32)
        prefix_ids = build_prefix(asked, merging_tokenizer(bos=bos), delimiter)
        item: object = "b" if isinstance(query, str) else [2]
        prompt = prompt_of(delimiter, bos=bos, query=query, items=[item])
        assert prefix_ids.tolist() == prompt.prefix_ids.tolist()
        assert prefix_ids.dtype == np.int32

    def test_joint_items_share_it_up_to_where_they_merge(self) -> None:
        assert build_prefix("xa", merging_tokenizer(bos=True), None).tolist() == [0, 4, 1]
        assert prompt_of(bos=True, query="xa", items=["b"], tokenization="joint").prefix_ids.tolist() == [0, 4, 1]

    @pytest.mark.parametrize("query", ["??", np.zeros(0, np.int32)])
    def test_one_without_tokens_is_refused(self, query: object) -> None:
        with pytest.raises(RequestError, match="query must hold at least one token") as caught:
            build_prefix(query, merging_tokenizer(bos=True), None)  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.param) == ("empty_query", "query")

    @pytest.mark.parametrize("query", ["xab", np.array([4, 5], np.int32)])
    def test_one_with_the_delimiter_in_it_is_refused(self, query: object) -> None:
        with pytest.raises(
            RequestError, match="query must not hold the delimiter token 5, got it at token 1"
        ) as caught:
            build_prefix(query, merging_tokenizer(), 5)  # type: ignore[arg-type]
        assert caught.value.code == "delimiter_collision"

    def test_text_needs_a_tokenizer_and_ids_do_not(self) -> None:
        assert build_prefix(np.array([4, 1], np.int32), None, None).tolist() == [4, 1]
        with pytest.raises(TokenizerError, match="no tokenizer"):
            build_prefix("xa", None, None)


def test_a_query_without_tokens_is_empty() -> None:
    with pytest.raises(RequestError, match="query must hold at least one token") as caught:
        prompt_of(query="??", items=["a"])
    error = caught.value
    assert (error.code, error.status, error.param) == ("empty_query", 400, "query")


@pytest.mark.parametrize(
    "fields",
    [{"query": "x", "items": ["a"], "label_token_ids": [1]}, {"query": [1], "items": [[2]], "labels": ["a"]}],
)
def test_text_without_a_tokenizer_is_an_error_that_says_so(fields: dict[str, object]) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer.*send token ids instead"):
        build_prompt(parse_score_request(fields), None, None)


def test_surround_puts_ids_around_every_row() -> None:
    rows = Ragged.from_sequences([[1], [], [2, 3]])
    before, after = np.array([8], np.int32), np.array([9, 9], np.int32)
    assert [row.tolist() for row in surround(before, rows, after)] == [
        [8, 1, 9, 9],
        [8, 9, 9],
        [8, 2, 3, 9, 9],
    ]
    assert surround(before[:0], rows, after[:0]) is rows


# What the model cannot take is an error before any work, by item


MODEL = FakeBackend(vocab_size=10, max_context_len=8).config


def check(
    label_tokens: int = 0, vocab_size: int = 10, *, report: bool = False, **fields: Any
) -> dict[int, RequestError]:
    prompt = build_prompt(parse_score_request({"label_token_ids": [1], **fields}), merging_tokenizer(), None)
    model = replace(MODEL, vocab_size=vocab_size)
    return check_limits(prompt, model, label_tokens=label_tokens, report=report)


class TestContext:
    def test_a_context_may_fill_the_model(self) -> None:
        assert check(query=[1] * 5, items=[[2] * 3, []]) == {}
        assert check(2, query=[1] * 5, items=[[2]]) == {}

    @pytest.mark.parametrize(
        ("label_tokens", "fields", "got"),
        [
            (0, {"query": [1] * 5, "items": [[2], [2] * 4]}, "prefix 5 + item 4 tokens;"),
            (0, {"query": [1] * 5, "items": [[2], [2] * 2], "suffix": [1, 1]}, "prefix 5 + item 4 tokens;"),
            (2, {"query": [1] * 5, "items": [[2], [2] * 2]}, "prefix 5 + item 2 tokens + label 2;"),
            (0, {"query": [1] * 5, "items": [[2], [2] * 4], "item_first": True}, "got 9 tokens;"),
            (0, {"query": "xxxxx", "items": ["a", "xxxx"], "tokenization": "joint"}, "got 9 tokens;"),
        ],
    )
    def test_the_error_names_the_item_the_limit_and_what_came(
        self, label_tokens: int, fields: dict[str, Any], got: str
    ) -> None:
        with pytest.raises(RequestError) as caught:
            check(label_tokens, **fields)
        error = caught.value
        assert (error.code, error.status, error.type) == ("context_too_long", 400, "invalid_value_error")
        assert (error.param, error.item_index) == ("items", 1)
        assert error.message.startswith("items[1] must fit the model's 8 tokens, ")
        assert got in error.message
        assert error.message.endswith("shorten it or set max_tokens_per_item")

    def test_where_no_item_could_fit_the_query_is_to_be_shortened(self) -> None:
        with pytest.raises(RequestError, match=r"items\[0\].*prefix 9 \+ item 0 tokens; shorten the query"):
            check(query=[1] * 9, items=[[]])

    def test_a_report_names_every_item_that_does_not_fit(self) -> None:
        errors = check(report=True, query=[1] * 5, items=[[2] * 4, [2], [2] * 9])
        assert {index: error.code for index, error in errors.items()} == {
            0: "context_too_long",
            2: "context_too_long",
        }

    def test_an_item_that_is_at_fault_already_is_left_alone(self) -> None:
        errors = check(report=True, query=[1] * 9, items=[[-1], [2]], on_item_error="report")
        assert list(errors) == [1]


class TestTokensThatTheModelLacks:
    """A tokenizer may know tokens that were added after the embedding was made; 7 is `abc`."""

    @pytest.mark.parametrize(
        ("fields", "param", "where"),
        [
            ({"query": "xabc", "items": ["a"]}, "query", "query"),
            ({"query": "x", "items": ["a", "xabc"]}, "items", "items[1]"),
            ({"query": "xa", "items": ["a", "bc"], "tokenization": "joint"}, "items", "items[1]"),
            (
                {"query": "x", "items": ["a"], "labels": ["a", "abc"], "label_token_ids": None},
                "labels",
                "labels[1]",
            ),
        ],
    )
    def test_the_error_names_the_text_and_the_token(self, fields: dict[str, Any], param: str, where: str) -> None:
        assert check(vocab_size=8, **fields) == {}
        with pytest.raises(RequestError) as caught:
            check(vocab_size=7, **fields)
        error = caught.value
        assert (error.code, error.status, error.param) == ("token_id_exceeds_vocab", 422, param)
        assert error.message.startswith(f"{where} must hold tokens below 7, the model's vocabulary size, ")
        assert error.message.endswith("token 7")

    def test_a_report_names_every_such_item_once(self) -> None:
        errors = check(vocab_size=7, report=True, query="x", items=["abcabc", "a", "abc" * 9])
        assert {index: error.code for index, error in errors.items()} == {
            0: "token_id_exceeds_vocab",
            2: "context_too_long",
        }


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """The embedded model's, for which ` positive` is another token than `positive`."""
    found = read_tokenizer(open_checkpoint(None))
    assert found is not None
    return found


class TestSpaceWarnings:
    def warnings(self, tokenizer: TextTokenizer, labels: list[str], **fields: Any) -> tuple[str, ...]:
        body = {"query": "Review: ", "items": ["", "I loved it."], "labels": labels, **fields}
        return space_warnings(parse_score_request(body), tokenizer)

    @pytest.mark.parametrize("suffix", [" Sentiment:", " Is it good?", " The mood is", None])
    def test_a_label_without_its_space_is_named_with_the_one_that_may_be_meant(
        self, tokenizer: TextTokenizer, suffix: str | None
    ) -> None:
        (warning,) = self.warnings(tokenizer, [" negative", "positive"], suffix=suffix)
        assert warning.startswith('labels[1] is "positive" without a space')
        assert warning.endswith('you may mean " positive"')

    @pytest.mark.parametrize(
        ("labels", "fields"),
        [
            ([" positive", " negative"], {"suffix": " Sentiment:"}),
            (["positive", "negative"], {"suffix": " Sentiment: "}),
            (["positive", "negative"], {"suffix": "<|im_start|>assistant\n"}),
            (["positive", "negative"], {"suffix": ' It is "'}),
            (["positive", "negative"], {"suffix": " It is ", "item_first": True}),
            (["!", "?"], {"suffix": " He said"}),
        ],
        ids=["with a space", "after a space", "chat", "quoted", "query last", "no word"],
    )
    def test_others_are_not(self, tokenizer: TextTokenizer, labels: list[str], fields: dict[str, Any]) -> None:
        assert self.warnings(tokenizer, labels, **fields) == ()

    def test_the_query_comes_last_where_the_item_is_first(self, tokenizer: TextTokenizer) -> None:
        assert len(self.warnings(tokenizer, ["yes"], query="Good?", items=["It is "], item_first=True)) == 1
        assert len(self.warnings(tokenizer, ["yes"], query="Good? ", items=["It is"], item_first=True)) == 0

    def test_they_are_bounded(self, tokenizer: TextTokenizer) -> None:
        assert len(self.warnings(tokenizer, ["positive"] * 50, suffix=" Sentiment:")) == 10

    def test_token_ids_have_no_spaces(self, tokenizer: TextTokenizer) -> None:
        request = parse_score_request({"query": [1], "items": [[2]], "label_token_ids": [3]})
        assert space_warnings(request, tokenizer) == ()

    def test_a_tokenizer_that_adds_the_space_itself(self) -> None:
        assert self.warnings(merging_tokenizer(), ["y"], query="x", items=["a"]) == ()
