"""The fields of judge requests, one row each, and the object that parsing makes of them.

A judge is a chat whose next message is one of a few answers. The messages hold `{item}` where each item is put, so that
all items share what stands before it: the rubric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, describe, quote
from prefixwise.contract.fields import (
    Field,
    Flag,
    NotServed,
    Schema,
    Structured,
    Text,
    check_names,
    missing,
    present_fields,
)
from prefixwise.contract.inputs import Place, checked_text, plain, plain_list
from prefixwise.contract.known_fields import KNOWN_FIELDS, KNOWN_GENERATION, not_generated
from prefixwise.contract.request import ALGORITHM, DEBUG_TOP_K, PRIORITY, SCORE_FIELDS, TEXTS, Algorithm

Role = Literal["system", "user", "assistant"]

ITEM = "{item}"  # in a message: where each item is put
MAX_ANSWERS = 1000  # each may have tokens of its own behind every item
_ROLES: tuple[Role, ...] = get_args(Role)
_DEVELOPER = "developer"  # OpenAI's newer name of `system`
_RANGE = re.compile(r"(-?\d{1,9})\s*-\s*(-?\d{1,9})|([a-z])\s*-\s*([a-z])|([A-Z])\s*-\s*([A-Z])")
_NUMBER = re.compile(r"\s*-?\d{1,15}(\.\d{1,15})?\s*")
_MAX_INTEGER = 10**15


class Message(NamedTuple):
    """One message of a chat."""

    role: Role
    content: str


# Messages


def _read_messages(value: object, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong_type(name, f"{name} must be {MESSAGES.values}", value)
    if not value:
        raise InvalidValueError(f"{name} must hold at least one message, got none", code=f"empty_{name}", param=name)
    return tuple(_message(plain(entry), f"{name}[{index}]", name) for index, entry in enumerate(value))


def _message(entry: object, place: str, name: str) -> Message:
    if not isinstance(entry, Mapping):
        raise _wrong_type(name, f'{place} must be an object like {{"role": "user", "content": "..."}}', entry)
    others = [key for key, value in entry.items() if key not in ("role", "content", "name") and value is not None]
    if others:  # ignoring a part of a message would judge another chat than was sent
        message = (
            f"{place} must hold a role, a content, perhaps a name and nothing else, got {describe(others[0])} in it"
        )
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    role = "system" if entry.get("role") == _DEVELOPER else entry.get("role")
    if role not in _ROLES:
        message = f"{place}.role must be one of {', '.join((*_ROLES, _DEVELOPER))}, got {describe(role)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    if not isinstance(entry.get("name"), str | None):
        raise _wrong_type(name, f"{place}.name must be a string", entry["name"])
    content = _content(plain(entry.get("content")), f"{place}.content", name)
    return Message(_ROLES[_ROLES.index(role)], checked_text(content, Place(f"{place}.content", name)))


def _content(value: object, place: str, name: str) -> str:
    """A text, or those of OpenAI's parts as vLLM puts them together: a line each."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise _wrong_type(name, f"{place} must be a string or a list of parts with text", value)
    if not value:
        raise InvalidValueError(f"{place} must hold at least one part, got none", code=f"empty_{name}", param=name)
    return "\n".join(_text_part(plain(part), f"{place}[{index}]", name) for index, part in enumerate(value))


def _text_part(part: object, place: str, name: str) -> str:
    """Raises for parts that are not text, such as images: only text is read."""
    if not isinstance(part, Mapping):
        raise _wrong_type(name, f'{place} must be an object like {{"type": "text", "text": "..."}}', part)
    if part.get("type") != "text" or part.keys() - {"type", "text"}:
        message = f"{place} must hold the type text, a text and nothing else, got {describe(part)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    if not isinstance(part.get("text"), str):
        raise _wrong_type(name, f"{place}.text must be a string", part.get("text"))
    return str(part["text"])


def _wrong_type(name: str, expected: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{expected}, got {describe(value)}", code=f"invalid_{name}_type", param=name)


def _read_items(value: object, name: str) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        raise _wrong_type(name, f"{name} must be {_ITEMS.values}", value)
    if not entries:
        raise InvalidValueError(f"{name} must hold at least one item, got none", code=f"empty_{name}", param=name)
    return tuple(_item(entry, Place(f"{name}[{i}]", name, i)) for i, entry in enumerate(plain_list(entries)))


def _item(entry: object, place: Place) -> str:
    if isinstance(entry, str):
        return checked_text(entry, place)
    message = f"{place.name} must be a string, got {describe(entry)}"
    raise InvalidRequestError(
        message, code=f"invalid_{place.param}_type", param=place.param, item_index=place.item_index
    )


# Answers


def _read_answers(value: object, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return _scale(checked_text(value, Place(name, name)), name)
    if not isinstance(value, list | tuple):
        raise _wrong_type(name, f"{name} must be {_ANSWERS.values}", value)
    return _checked_answers([_answer(entry, f"{name}[{i}]", name) for i, entry in enumerate(plain_list(value))], name)


def _scale(text: str, name: str) -> tuple[str, ...]:
    """The answers of `1-5`, `A-E` or `yes/no`."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        if "/" not in text:
            message = f"{name} must be {_ANSWERS.values}, got {describe(text)}"
            raise InvalidValueError(message, code=f"invalid_{name}", param=name)
        return _checked_answers([part.strip() for part in text.split("/")], name)
    first, last = (each for each in found.groups() if each is not None)
    low, high = (int(first), int(last)) if found[1] else (ord(first), ord(last))
    if not low < high < low + MAX_ANSWERS:
        message = f"{name} must be a scale that rises by at most {MAX_ANSWERS} answers, got {describe(text)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    return tuple(str(each) if found[1] else chr(each) for each in range(low, high + 1))


def _answer(entry: object, place: str, name: str) -> str:
    if isinstance(entry, int) and not isinstance(entry, bool) and abs(entry) < _MAX_INTEGER:
        return str(entry)
    if not isinstance(entry, str):
        raise _wrong_type(name, f"{place} must be a string or an integer", entry)
    return checked_text(entry, Place(place, name))


def _checked_answers(answers: list[str], name: str) -> tuple[str, ...]:
    if not answers or "" in answers:
        place = f"{name}[{answers.index('')}]" if answers else name
        message = f"{place} must hold at least one {'character' if answers else 'answer'}, got none"
        raise InvalidValueError(message, code=f"empty_{name}", param=name)
    if not 2 <= len(answers) <= MAX_ANSWERS:
        message = f"{name} must hold from 2 to {MAX_ANSWERS} answers, got {len(answers)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    if len(set(answers)) < len(answers):
        twice = next(each for index, each in enumerate(answers) if each in answers[:index])
        message = f"{name} must differ from each other, got {quote(twice)} twice"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    return tuple(answers)


def _read_values(value: object, name: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong_type(name, f"{name} must be {_VALUES.values}", value)
    return tuple(_finite(entry, f"{name}[{index}]", name) for index, entry in enumerate(plain_list(value)))


def _finite(entry: object, place: str, name: str) -> float:
    if not isinstance(entry, int | float) or isinstance(entry, bool):
        raise _wrong_type(name, f"{place} must be a number", entry)
    if not abs(entry) <= _MAX_INTEGER:  # NaN is not
        message = f"{place} must be a number of at most 15 digits, got {describe(entry)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    return float(entry)


# Fields

_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "additionalProperties": False,
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": [*_ROLES, _DEVELOPER]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}]},
        "name": {"type": ["string", "null"], "description": "Has no effect."},
    },
    "additionalProperties": False,
}
MESSAGES = Structured(
    "a list of messages, each with role and content",
    {"type": "array", "minItems": 1, "items": _MESSAGE},
    _read_messages,
)
_ITEMS = Structured(
    "a list of strings", {"anyOf": [{"type": "string"}, {**TEXTS, "minItems": 1}, {"type": "null"}]}, _read_items
)
_INTEGER: Schema = {"type": "integer", "exclusiveMinimum": -_MAX_INTEGER, "exclusiveMaximum": _MAX_INTEGER}
_ANSWERS = Structured(
    'a list of answers, or a scale like "1-5", "A-E" or "yes/no"',
    {
        "anyOf": [
            {
                "type": "array",
                "minItems": 2,
                "maxItems": MAX_ANSWERS,
                "uniqueItems": True,
                "items": {"anyOf": [{"type": "string", "minLength": 1}, _INTEGER]},
            },
            {"type": "string", "examples": ["1-5", "A-E", "yes/no"]},
        ]
    },
    _read_answers,
)
_VALUES = Structured("a list of numbers", {"type": ["array", "null"], "items": {"type": "number"}}, _read_values)
_SCORE_ROWS = {row.name: row for row in SCORE_FIELDS}

JUDGE_FIELDS = (
    Field(
        "messages",
        MESSAGES,
        "The chat, which the model's chat template renders. With items, {item} stands once where each item is put; "
        "what comes before it is computed once. An assistant's message at the end is the beginning of the answer.",
        is_required=True,
    ),
    Field(
        "items",
        _ITEMS,
        "The texts to judge, each by itself; one text is one item. If absent, the chat itself is judged.",
    ),
    Field(
        "answers",
        _ANSWERS,
        'The answers to choose from, or a scale: "1-5", "A-E", or answers with slashes like "yes/no".',
        is_required=True,
    ),
    Field(
        "values",
        _VALUES,
        "The value of each answer, for the expected value; if absent, the answers themselves where all are numbers.",
    ),
    _SCORE_ROWS["max_tokens_per_item"],
    ALGORITHM,
    Field("return_debug", Flag(), "Report in `debug` how the answers were computed.", False),
    DEBUG_TOP_K,
    PRIORITY,
    Field("model", Text(), 'A served name; if absent or "default", the served model.', in_python=False),
)
_NAMES = frozenset(row.name for row in JUDGE_FIELDS)

_KNOWN: Mapping[str, NotServed] = {
    **KNOWN_FIELDS,
    **KNOWN_GENERATION,
    **not_generated("nothing is generated, and the response has the probabilities of all answers"),
    "labels": NotServed("the answers to choose from are `answers`"),
}


class JudgeOptions(TypedDict, total=False):
    """The keyword arguments of `Scorer.judge`, beside the answers."""

    values: Iterable[float] | None
    max_tokens_per_item: int | None
    algorithm: Algorithm
    return_debug: bool
    debug_top_k: int | None


@dataclass(frozen=True)
class JudgeRequest:
    """A chat, the items to put into it, and the answers to choose from."""

    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    items: tuple[str, ...] | None = None  # None: the chat has no place for one
    values: tuple[float, ...] | None = None  # of the answers; None: they have none
    max_tokens_per_item: int | None = None
    algorithm: Algorithm = "auto"
    return_debug: bool = False
    debug_top_k: int | None = None
    priority: int = 0
    model: str | None = None
    warnings: tuple[str, ...] = ()  # about unknown fields

    @property
    def num_items(self) -> int:
        return 1 if self.items is None else len(self.items)


def parse_judge_request(body: object) -> JudgeRequest:
    """Raises a `RequestError` for the first thing wrong."""
    fields = chat_fields(body)
    warnings = check_names(fields, _NAMES, _KNOWN)
    for row in JUDGE_FIELDS:
        if row.is_required and row.name not in fields:
            raise missing(row.name, row.kind.expected())
    values: dict[str, Any] = {row.name: row.read(fields) for row in JUDGE_FIELDS}
    _check_places(values["messages"], values["items"])
    values["values"] = _values_of(values["answers"], values["values"])
    if values["debug_top_k"] is not None and not values["return_debug"]:
        message = "debug_top_k is shown in the debug block: expected return_debug true beside it, got it alone"
        raise InvalidValueError(message, code="conflicting_parameters", param="debug_top_k")
    return JudgeRequest(**values, warnings=warnings)


def chat_fields(body: object) -> dict[str, object]:
    """The fields that are present, but for vLLM's two to continue the assistant's message at the end: it always is."""
    fields = present_fields(body)
    messages = fields.get("messages")
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and fields.get("continue_final_message") is True:
        continues = {"continue_final_message": True, "add_generation_prompt": False}
        return {name: value for name, value in fields.items() if continues.get(name) is not value}
    return fields


def _check_places(messages: Sequence[Message], items: Sequence[str] | None) -> None:
    """`{item}` stands once in the messages if there are items, else not at all."""
    num_places = sum(each.content.count(ITEM) for each in messages)
    if items is None and num_places:
        raise missing("items", f"a list of strings to put in the place of {ITEM}")
    if items is not None and num_places != 1:
        message = f"messages must hold {ITEM} once, in the place where each item is put, got it {num_places} times"
        raise InvalidValueError(message, code="invalid_messages", param="messages")


def _values_of(answers: Sequence[str], values: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if values is None:
        return tuple(map(float, answers)) if all(map(_NUMBER.fullmatch, answers)) else None
    if len(values) != len(answers):
        message = f"values must hold one number for each of the {len(answers)} answers, got {len(values)}"
        raise InvalidValueError(message, code="invalid_values", param="values")
    return values
