"""A profile's format: what a legal one says, and how many things can be wrong with another."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from prefixwise.contract.errors import ProfileError
from prefixwise.prompts.profile import NUM_LABELS, RELEVANCES, Piece, Profile, parse_profile, placeholders

LEGAL: dict[str, Any] = {
    "format": 1,
    "name": "mine",
    "description": "for my model",
    "relevance": "softmax",
    "labels": ["yes", "no"],
    "instruction": "find it",
    "prompt": {
        "before": ["<|x|>system\n"],
        "body": [
            {"text": "I: {instruction}\nQ: {query}", "without_instruction": "Q: {query}"},
            "D: {document}",
        ],
        "after": ["\n", "{instruction}? {{yes}}"],
        "special_tokens": ["<|x|>"],
        "add_bos": True,
        "max_context_len": 100,
        "max_body_len": 50,
    },
    "recognise": {"names": ["*mine*"], "families": ["llama"]},
}
LEAST: dict[str, Any] = {
    "name": "least",
    "relevance": "logit",
    "labels": ["1"],
    "prompt": {"body": ["{query}", "{document}"]},
}


def with_(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with values at dotted paths; None takes a key away."""
    data = deepcopy(base)
    for path, value in changes.items():
        *tables, key = path.split(".")
        table = data
        for name in tables:
            table = table.setdefault(name, {})
        if value is None:
            del table[key]
        else:
            table[key] = value
    return data


def problems_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        parse_profile(data, "my.toml")
    message = str(caught.value)
    assert message.startswith("my.toml is not a profile: ")
    return message.removeprefix("my.toml is not a profile: ").split("; ")


def test_a_legal_profile_is_read_whole() -> None:
    assert parse_profile(LEGAL, "my.toml") == Profile(
        name="mine",
        description="for my model",
        relevance="softmax",
        labels=("yes", "no"),
        before=(Piece("<|x|>system\n"),),
        body=(Piece("I: {instruction}\nQ: {query}", "Q: {query}"), Piece("D: {document}")),
        after=(Piece("\n"), Piece("{instruction}? {{yes}}")),
        special_tokens=("<|x|>",),
        add_bos=True,
        instruction="find it",
        max_context_len=100,
        max_body_len=50,
        names=("*mine*",),
        families=("llama",),
    )


def test_little_is_required() -> None:
    profile = parse_profile(LEAST, "my.toml")
    assert (profile.temperature, profile.label_token_ids, profile.joint, profile.strip) == (1.0, (), False, False)
    assert (profile.description, profile.instruction, profile.before, profile.after) == ("", None, (), ())
    assert (profile.add_bos, profile.chat, profile.max_context_len, profile.max_body_len) == (False, False, None, None)
    assert (profile.names, profile.families, profile.special_tokens) == ((), (), ())
    assert not profile.takes_instruction


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"format": "1"}, 'format must be an integer of 1 or more, got "1" (str)'),
        ({"format": True}, "format must be an integer of 1 or more, got True (bool)"),
        ({"name": None}, "name is missing"),
        ({"name": ""}, 'name must be a string that is not empty, got "" (str)'),
        ({"name": 3}, "name must be a string that is not empty, got 3 (int)"),
        ({"description": ["x"]}, "description must be a string that is not empty, got ['x'] (list)"),
        ({"relevance": None}, "relevance is missing"),
        ({"relevance": "yes"}, "relevance must be one of softmax, logit, logit_diff, prob, from_request"),
        ({"relevance": 1}, "relevance must be one of softmax, logit, logit_diff, prob, from_request, got 1 (int)"),
        ({"labels": "yes"}, 'labels must be a list of strings, none of them empty, got "yes" (str)'),
        ({"labels": ["yes", ""]}, "labels must be a list of strings, none of them empty"),
        ({"labels": ["yes", 1]}, "labels must be a list of strings, none of them empty"),
        ({"instruction": 5}, "instruction must be a string that is not empty, got 5 (int)"),
        ({"label_token_ids": [1, -1]}, "label_token_ids must be a list of integers of 0 or more"),
        ({"label_token_ids": [True]}, "label_token_ids must be a list of integers of 0 or more"),
        ({"temperature": 0}, "temperature must be a number above 0, got 0 (int)"),
        ({"temperature": float("inf")}, "temperature must be a number above 0, got inf (float)"),
        ({"prompt": ["x"]}, "prompt must be a table"),
        ({"recognise": "x"}, 'recognise must be a table, got "x" (str)'),
        ({"prompt.before": "x"}, 'prompt.before must be a list of pieces, got "x" (str)'),
        ({"prompt.body": {"text": "x"}}, "prompt.body must be a list of pieces"),
        ({"prompt.after": [3]}, "prompt.after[0] must be a string or a table with text, got 3 (int)"),
        ({"prompt.after": ["x", [1]]}, "prompt.after[1] must be a string or a table with text"),
        ({"prompt.after": [{}]}, "prompt.after[0].text is missing"),
        ({"prompt.after": [{"text": ""}]}, 'prompt.after[0].text must be a string that is not empty, got "" (str)'),
        ({"prompt.after": [{"text": "x", "otherwise": "y"}]}, "prompt.after[0].otherwise is unknown"),
        ({"prompt.after": [{"text": "x", "without_instruction": 1}]}, "prompt.after[0].without_instruction must be"),
        ({"prompt.special_tokens": "<|x|>"}, "prompt.special_tokens must be a list of strings"),
        ({"prompt.add_bos": 1}, "prompt.add_bos must be true or false, got 1 (int)"),
        ({"prompt.chat": "yes"}, 'prompt.chat must be true or false, got "yes" (str)'),
        ({"prompt.without_chat_template": 1}, "prompt.without_chat_template must be a string that is not empty"),
        ({"prompt.max_context_len": 0}, "prompt.max_context_len must be an integer of 1 or more, got 0 (int)"),
        ({"prompt.max_body_len": -1}, "prompt.max_body_len must be an integer of 1 or more, got -1 (int)"),
        ({"prompt.max_body_len": 1.5}, "prompt.max_body_len must be an integer of 1 or more, got 1.5 (float)"),
        ({"recognise.names": "*x*"}, 'recognise.names must be a list of strings, none of them empty, got "*x*" (str)'),
        ({"recognise.families": [1]}, "recognise.families must be a list of strings"),
        ({"lables": ["x"]}, "lables is unknown"),
        ({"prompt.max_len": 3}, "prompt.max_len is unknown"),
        ({"recognise.name": "x"}, "recognise.name is unknown"),
        ({"prompt.after": ["{answer}"]}, "prompt.after[0]: unknown placeholder {answer}"),
        ({"prompt.after": ["{}"]}, "prompt.after[0]: unknown placeholder {}"),
        ({"prompt.after": ["{0}"]}, "prompt.after[0]: unknown placeholder {0}"),
        ({"prompt.after": ["{query!r}"]}, "prompt.after[0]: unknown placeholder {query!r}"),
        ({"prompt.after": ["{query:>9}"]}, "prompt.after[0]: unknown placeholder {query:>9}"),
        ({"prompt.after": ["{query.__class__}"]}, "prompt.after[0]: unknown placeholder {query.__class__}"),
        ({"prompt.after": ["{query[0]}"]}, "prompt.after[0]: unknown placeholder {query[0]}"),
        ({"prompt.after": ["{query"]}, "prompt.after[0]: expected '}' before end of string"),
        ({"prompt.after": ["}"]}, "prompt.after[0]: Single '}' encountered in format string"),
        (
            {"prompt.after": [{"text": "x", "without_instruction": "{answer}"}]},
            "prompt.after[0]: unknown placeholder {answer}",
        ),
    ],
)
def test_a_value_that_cannot_be_read_is_named(changes: dict[str, Any], problem: str) -> None:
    found = problems_of(with_(LEGAL, changes))
    assert len([each for each in found if each.startswith(problem)]) == 1, found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt.body": ["{document}"]}, "{query} is nowhere"),
        ({"prompt.body": []}, "{document} must occur once, at the very end of the last piece of prompt.body"),
        ({"prompt.body": ["{query}"]}, "{document} must occur once"),
        ({"prompt.body": ["{query}", "{document}."]}, "{document} must occur once"),
        ({"prompt.body": ["{query}{document}", "x"]}, "{document} must occur once"),
        ({"prompt.body": ["{document}{query}", "{document}"]}, "{document} must occur once"),
        ({"prompt.after": ["{document}"]}, "{document} must occur once"),
        (
            {"prompt.body": ["{query}", {"text": "{document}", "without_instruction": "{document}"}]},
            "{document} cannot be in without_instruction",
        ),
        ({"prompt.before": ["{query}"]}, "prompt.before is fixed text: {query} must be in prompt.body"),
        ({"prompt.special_tokens": ["<|y|>"]}, "prompt.special_tokens: <|y|> is in no piece"),
        ({"instruction": "find it"}, "instruction needs a piece with {instruction}"),
        ({"prompt.without_chat_template": "plain"}, "prompt.without_chat_template is only for prompt.chat"),
        ({"prompt.chat": True, "prompt.add_bos": True}, "prompt.add_bos: a chat template adds its own"),
        ({"labels": []}, 'labels: relevance "logit" takes 1, got 0'),
        ({"labels": ["1", "0"]}, 'labels: relevance "logit" takes 1, got 2'),
        ({"relevance": "softmax"}, 'labels: relevance "softmax" takes 2 or more, got 1'),
        ({"relevance": "logit_diff"}, 'labels: relevance "logit_diff" takes 2, got 1'),
        ({"relevance": "logit_diff", "labels": ["a", "b", "c"]}, 'labels: relevance "logit_diff" takes 2, got 3'),
        ({"relevance": "prob", "labels": ["a", "b"]}, 'labels: relevance "prob" takes 1, got 2'),
        ({"relevance": "from_request"}, 'labels: relevance "from_request" takes 0, got 1'),
        ({"relevance": "softmax", "labels": ["a", "a"]}, "labels must differ, got a, a"),
        ({"label_token_ids": [0]}, "labels and label_token_ids say the same twice"),
        ({"relevance": "softmax", "labels": [], "label_token_ids": [3, 3]}, "labels must differ, got 3, 3"),
        ({"relevance": "prob", "temperature": 5}, 'temperature is for a sigmoid, and relevance "prob" has none'),
        ({"recognise.families": ["llama", "lama"]}, "recognise.families: expected some of qwen3, qwen2, llama, "),
        ({"prompt.joint": True, "prompt.after": []}, "prompt.joint is for documents that are tokenized together"),
        (
            {"prompt.joint": True, "prompt.after": ["?"], "prompt.max_body_len": 9},
            "prompt.max_body_len: with prompt.joint = true only max_context_len can bound",
        ),
    ],
)
def test_a_profile_that_contradicts_itself_is_told_how(changes: dict[str, Any], problem: str) -> None:
    found = problems_of(with_(LEAST, changes))
    assert len([each for each in found if each.startswith(problem)]) == 1, found


def test_all_problems_are_named_at_once() -> None:
    found = problems_of(
        with_(LEGAL, {"name": None, "labels": 3, "prompt.add_bos": 0, "prompt.x": 1, "recognise.names": 1, "y": 2})
    )
    starts = ["recognise.names must", "prompt.add_bos must", "prompt.x is", "name is missing", "labels must", "y is"]
    for start in starts:
        assert any(each.startswith(start) for each in found), start
    assert [each for each in found if "is unknown" in each] == ["prompt.x is unknown", "y is unknown"]


def test_all_contradictions_are_named_at_once() -> None:
    found = problems_of(with_(LEAST, {"prompt.body": ["x"], "labels": ["a", "a"], "instruction": "x"}))
    assert [each.split()[0] for each in found if not each.startswith("expected")] == [
        "labels:",
        "labels",
        "{query}",
        "{document}",
        "instruction",
    ]


def test_an_unknown_key_is_told_those_that_are_known() -> None:
    with pytest.raises(ProfileError, match=r"prompt.max_len is unknown; expected add_bos, after, .*max_body_len"):
        parse_profile(with_(LEGAL, {"prompt.max_len": 3}), "my.toml")


def test_a_misspelt_table_is_the_one_problem() -> None:
    data = {("promt" if key == "prompt" else key): value for key, value in LEGAL.items()}
    assert problems_of(data) == ["promt is unknown", "did you mean prompt?"]
    assert problems_of(with_(LEGAL, {"recognise.name": []})) == [
        "recognise.name is unknown",
        "did you mean recognise.names?",
    ]


@pytest.mark.parametrize("relevance", RELEVANCES)
def test_as_many_labels_as_the_relevance_takes_are_legal(relevance: str) -> None:
    least, most = NUM_LABELS[relevance]
    for count in {least, most if most is not None else least + 3}:
        labels = [str(number) for number in range(count)]
        assert len(parse_profile(with_(LEAST, {"relevance": relevance, "labels": labels}), "x").labels) == count


@pytest.mark.parametrize(
    "piece",
    [
        {"text": "I: {instruction}\nQ: {query}", "without_instruction": "Q: none"},
        {"text": "I: {instruction}", "without_instruction": "Q: {query}"},
    ],
)
def test_the_query_must_stand_there_with_and_without_an_instruction(piece: dict[str, str]) -> None:
    with pytest.raises(ProfileError, match=r"\{query\}"):
        parse_profile(with_(LEAST, {"prompt.body": [piece, "{document}"]}), "my.toml")


def test_a_piece_has_another_text_where_there_is_no_instruction() -> None:
    piece = Piece("with {instruction}", "without")
    assert (piece.template("x"), piece.template(""), piece.template(None)) == (
        "with {instruction}",
        "without",
        "without",
    )
    assert Piece("same").template(None) == "same"


def test_a_profile_knows_whether_it_takes_an_instruction() -> None:
    profile = parse_profile(LEGAL, "my.toml")
    assert profile.takes_instruction
    assert replace(profile, before=(), body=()).takes_instruction  # it stands after the document too
    assert not replace(profile, body=(Piece("{{instruction}} {query}"),), after=()).takes_instruction


def test_placeholders_are_found_in_order_and_doubled_braces_are_none() -> None:
    assert placeholders("{query} {{x}} {document}{query}") == ["query", "document", "query"]
    with pytest.raises(ValueError, match="Single '}'"):
        placeholders("}")


def test_a_profile_is_toml() -> None:
    text = 'name = "least"\nrelevance = "logit"\nlabels = ["1"]\n[prompt]\nbody = ["{query}", "{document}"]\n'
    assert parse_profile(tomllib.loads(text), "x") == parse_profile(LEAST, "x")
