"""Judge requests: what parses to what, the error of each wrong one, and the arithmetic of distributions."""

from __future__ import annotations

import doctest
import inspect
import math
from typing import Any, get_type_hints

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.contract import judge_result
from prefixwise.contract.errors import RequestError
from prefixwise.contract.judge import JUDGE_FIELDS, JudgeOptions, JudgeRequest, parse_judge_request
from prefixwise.contract.judge_result import Judgement, JudgeResult, distributions, next_longer
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.result import Usage

CHAT = [{"role": "user", "content": "Rate this: {item}"}]
TEXT = {"type": "text", "text": "a {item}"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
BODY: dict[str, Any] = {"messages": CHAT, "items": ["a", "b"], "answers": "1-5"}


def parsed(**fields: Any) -> JudgeRequest:
    return parse_judge_request({**BODY, **fields})


class TestRequests:
    @pytest.mark.parametrize(
        ("answers", "expected"),
        [
            ("1-5", ("1", "2", "3", "4", "5")),
            (" 0 - 10 ", tuple(map(str, range(11)))),
            ("-1-1", ("-1", "0", "1")),
            ("-3--1", ("-3", "-2", "-1")),
            ("A-E", ("A", "B", "C", "D", "E")),
            ("a-c", ("a", "b", "c")),
            ("yes/no", ("yes", "no")),
            ("good / bad / ugly", ("good", "bad", "ugly")),
            ([" yes", " no"], (" yes", " no")),
            ([1, "2 stars"], ("1", "2 stars")),
            (np.array([1, 2]), ("1", "2")),
        ],
    )
    def test_answers_and_scales(self, answers: object, expected: tuple[str, ...]) -> None:
        assert parsed(answers=answers).answers == expected

    @pytest.mark.parametrize(
        ("answers", "values", "expected"),
        [
            ("1-3", None, (1.0, 2.0, 3.0)),
            ([" 0.5", " 1"], None, (0.5, 1.0)),
            ("yes/no", None, None),
            (["1", "many"], None, None),
            (["1", "9" * 400], None, None),  # as a number it would be infinite
            ("yes/no", [1, 0.0], (1.0, 0.0)),
            ("1-3", (3, 2, 1), (3.0, 2.0, 1.0)),
        ],
    )
    def test_values_are_given_or_the_answers_numbers(self, answers: object, values: object, expected: object) -> None:
        assert parsed(answers=answers, values=values).values == expected

    def test_messages_in_openais_newer_forms(self) -> None:
        parts = [TEXT, {"type": "text", "text": "b"}]
        sent = [{"role": "developer", "content": "s", "refusal": None}, {"role": "user", "content": parts, "name": "x"}]
        assert parsed(messages=sent).messages == (("system", "s"), ("user", "a {item}\nb"))

    def test_a_chat_may_come_without_items(self) -> None:
        request = parse_judge_request({"messages": [{"role": "user", "content": "{items}"}], "answers": "yes/no"})
        assert (request.items, request.num_items) == (None, 1)
        assert parsed(items="one text").items == ("one text",)

    @pytest.mark.parametrize(
        ("changes", "code", "message"),
        [
            ({"messages": None}, "missing_messages", "messages is required: expected a list of messages"),
            ({"answers": None}, "missing_answers", "answers is required: expected a list of answers, or a scale"),
            ({"messages": "hi"}, "invalid_messages_type", "messages must be a list of messages"),
            ({"messages": []}, "empty_messages", "messages must hold at least one message"),
            ({"messages": ["hi"]}, "invalid_messages_type", "messages[0] must be an object like"),
            ({"messages": [{"role": "user"}]}, "invalid_messages_type", "messages[0].content must be a string"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "invalid_messages", "one of system, user, assistant"),
            ({"messages": [{"role": ["user"], "content": "a"}]}, "invalid_messages", "one of system, user, assistant"),
            ({"messages": [{**CHAT[0], "tool_calls": ["x"]}]}, "invalid_messages", "nothing else, got"),
            ({"messages": [{**CHAT[0], "name": 3}]}, "invalid_messages_type", "messages[0].name must be a string"),
            ({"messages": [{"role": "user", "content": 3}]}, "invalid_messages_type", "a string or a list of parts"),
            ({"messages": [{"role": "user", "content": []}]}, "empty_messages", "messages[0].content must hold"),
            (
                {"messages": [{"role": "user", "content": ["a"]}]},
                "invalid_messages_type",
                "content[0] must be an object",
            ),
            ({"messages": [{"role": "user", "content": [IMAGE]}]}, "invalid_messages", "content[0] must hold the type"),
            ({"messages": [{"role": "user", "content": [{**TEXT, "x": 1}]}]}, "invalid_messages", "and nothing else"),
            (
                {"messages": [{"role": "user", "content": [{**TEXT, "text": 1}]}]},
                "invalid_messages_type",
                "[0].text must",
            ),
            ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_unicode", "messages[0].content"),
            ({"messages": [{"role": "user", "content": "a"}]}, "invalid_messages", "hold {item} once, in the place"),
            ({"messages": CHAT * 2}, "invalid_messages", "got it 2 times"),
            ({"items": None}, "missing_items", "to put in the place of {item}"),
            ({"items": []}, "empty_items", "items must hold at least one item"),
            ({"items": 3}, "invalid_items_type", "items must be a list of strings"),
            ({"items": ["a", [1]]}, "invalid_items_type", "items[1] must be a string"),
            ({"items": ["a", "\ud800"]}, "invalid_unicode", "items[1] must be valid Unicode"),
            ({"answers": "5"}, "invalid_answers", 'a scale like "1-5", "A-E" or "yes/no"'),
            ({"answers": "5-1"}, "invalid_answers", "a scale that rises"),
            ({"answers": "0-1000"}, "invalid_answers", "at most 1000 answers"),
            ({"answers": "A-e"}, "invalid_answers", "a scale like"),
            ({"answers": "yes//no"}, "empty_answers", "answers[1] must hold at least one character"),
            ({"answers": []}, "empty_answers", "answers must hold at least one answer"),
            ({"answers": ["a"]}, "invalid_answers", "from 2 to 1000 answers, got 1"),
            ({"answers": list(range(1001))}, "invalid_answers", "from 2 to 1000 answers, got 1001"),
            ({"answers": ["a", "b", "a"]}, "invalid_answers", 'got "a" twice'),
            ({"answers": [True, False]}, "invalid_answers_type", "answers[0] must be a string or an integer"),
            ({"answers": [1.5, 2]}, "invalid_answers_type", "answers[0] must be a string or an integer"),
            ({"answers": {"1": 2}}, "invalid_answers_type", "answers must be a list"),
            ({"values": [1, 2]}, "invalid_values", "one number for each of the 5 answers, got 2"),
            ({"values": [1, 2, 3, 4, "5"]}, "invalid_values_type", "values[4] must be a number"),
            ({"values": [1, 2, 3, 4, math.nan]}, "invalid_values", "values[4] must be a number of at most"),
            ({"values": [1, 2, 3, 4, 10**400]}, "invalid_values", "values[4] must be a number of at most"),
            ({"values": 5}, "invalid_values_type", "values must be a list of numbers"),
            ({"max_tokens_per_item": 0}, "invalid_max_tokens_per_item", "1 or more"),
            ({"debug_top_k": 3}, "conflicting_parameters", "return_debug true beside it"),
            ({"temperature": 0}, "unsupported_parameter", "nothing is generated"),
            ({"labels": ["x"]}, "unsupported_parameter", "are `answers`"),
            ({"query": "x"}, "unsupported_parameter", "query is not served here"),
        ],
    )
    def test_the_first_fault_is_named(self, changes: dict[str, object], code: str, message: str) -> None:
        with pytest.raises(RequestError) as caught:
            parsed(**changes)
        assert (caught.value.code, caught.value.status) == (code, 400)
        assert message in caught.value.message

    def test_unknown_fields_are_named_and_harmless_ones_are_not(self) -> None:
        assert parsed(temperature=1.0, n=1, stream=False, anwsers="1-5").warnings == (
            'the field "anwsers" is unknown and was ignored; did you mean answers?',
        )

    def test_its_fields_are_refused_where_items_are_scored(self) -> None:
        body = {"query": [1], "items": [[2]], "label_token_ids": [3]}
        for name in ("messages", "answers", "values"):
            with pytest.raises(RequestError, match="a field of requests that judge"):
                parse_score_request({**body, name: ["a"]})

    def test_every_attribute_has_a_row(self) -> None:
        assert {row.name for row in JUDGE_FIELDS} == set(JudgeRequest.__dataclass_fields__) - {"warnings"}

    def test_python_methods_take_and_explain_the_options(self) -> None:
        parameters, rows = inspect.signature(Scorer.judge).parameters, {row.name: row for row in JUDGE_FIELDS}
        names = set(get_type_hints(JudgeOptions))
        assert set(parameters) == {"self", "messages", "items", "answers", "lora", "on_progress", *names}
        for name in names:
            assert parameters[name].default == rows[name].default
            assert f"{name}: {rows[name].about}" in (Scorer.judge.__doc__ or "")


class TestDistributions:
    def test_by_hand(self) -> None:
        logprobs = np.log([[0.1, 0.3], [0.5, 0.5]])
        found = distributions(logprobs, ((), ()), (1.0, 3.0))
        np.testing.assert_allclose(found.probs, [[0.25, 0.75], [0.5, 0.5]])
        np.testing.assert_allclose(found.mass, [0.4, 1.0])
        np.testing.assert_allclose(found.entropy, [-0.25 * math.log2(0.25) - 0.75 * math.log2(0.75), 1.0])
        assert found.expected is not None
        np.testing.assert_allclose(found.expected, [2.5, 2.0])
        assert distributions(logprobs, ((), ()), None).expected is None

    def test_an_answer_that_begins_another_stands_for_itself(self) -> None:
        """1, 10, 100 and 2 as tokens of one digit: of 0.6 that begins with 1, 0.5 goes on to 10, and 0.2 to 100."""
        answers = [(1,), (1, 0), (1, 0, 0), (2,)]
        assert next_longer(answers) == ((1,), (2,), (), ())
        found = distributions(np.log([[0.6, 0.5, 0.2, 0.2]]), next_longer(answers), None)
        np.testing.assert_allclose(found.probs, [[0.125, 0.375, 0.25, 0.25]])
        np.testing.assert_allclose(found.mass, [0.8])

    def test_answers_may_have_several_longer_ones(self) -> None:
        assert next_longer([(7, 1, 2), (7,), (7, 3), (7, 1), (8, 7)]) == ((), (2, 3), (), (0,), ())

    def test_certain_and_impossible_answers_have_finite_numbers(self) -> None:
        """Rounding may make the longer answer as likely as the one that it begins with, or more."""
        found = distributions(np.array([[-1e-9, 0.0, -2000.0]]), ((1,), (), ()), (1.0, 2.0, 3.0))
        assert found.probs.tolist() == [[0.0, 1.0, 0.0]]
        assert (found.entropy.tolist(), found.mass.tolist()) == ([0.0], [1.0])

    def test_a_row_does_not_depend_on_others(self) -> None:
        logprobs = np.random.default_rng(5).normal(-5, 3, (7, 9))
        logprobs[:, 3] = logprobs[:, 2] - 0.5
        longer = ((), (), (3,), *[()] * 6)
        whole = distributions(logprobs, longer, range(9))
        for index in range(7):
            alone = distributions(np.asfortranarray(logprobs[index : index + 1]), longer, range(9))
            for one, other in zip(whole, alone, strict=True):
                assert one is not None
                assert other is not None
                assert np.array_equal(one[index : index + 1], other)


class TestResults:
    def test_the_examples_of_the_docstrings_are_true(self) -> None:
        found = doctest.testmod(judge_result)
        assert found.attempted >= 5
        assert found.failed == 0

    def test_a_table_has_a_column_for_each_answer(self) -> None:
        entries = [
            Judgement(0, "a", "2", [0.2, 0.8], 1.8, 0.72, 0.9),
            Judgement(1, "b", "1", [0.6, 0.4], 1.4, 0.97, 0.8),
        ]
        result = JudgeResult(entries, ("1", "2"), "m", Usage(9), warnings=("careful",))
        assert result.to_dicts()[0] == {
            "index": 0,
            "item": "a",
            "answer": "2",
            "1": 0.2,
            "2": 0.8,
            "expected_value": 1.8,
            "entropy": 0.72,
            "mass": 0.9,
        }
        assert [each.answer for each in result] == ["2", "1"]
        assert repr(result).startswith("JudgeResult: 2 items, model m")
        assert repr(result).endswith("warning: careful")
