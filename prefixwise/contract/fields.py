"""What a request field is: its name, how its value is checked, and how it is described.

`request.py` has one `Field` per field of a request. Parsing, the OpenAPI document, the command-line options, the
docstrings of `Scorer` and the table in the documentation are made from these rows.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_type_hints

from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, MissingParameterError, describe, quote
from prefixwise.contract.inputs import Place, checked_text, plain

Body = Mapping[str, object]
Schema = dict[str, Any]
Panel = Literal["Input", "Scoring", "Output"]
Value = TypeVar("Value", bound=str)
Method = TypeVar("Method", bound=Callable[..., Any])


# Checks of single fields. A field that is None counts as absent.


def present_fields(body: object) -> dict[str, object]:
    """The fields that are not None, arrays and columns as lists. Raises invalid_json for anything but an object."""
    if not isinstance(body, Mapping):
        message = f"the request must be a JSON object, got {describe(body)}"
        raise InvalidRequestError(message, code="invalid_json")
    return {name: plain(value) for name, value in body.items() if value is not None}


def missing(name: str, expected: str) -> MissingParameterError:
    """The error missing_NAME."""
    message = f"{name} is required: expected {expected}, got nothing"
    return MissingParameterError(message, code=f"missing_{name}", param=name)


def required(fields: Body, name: str, expected: str) -> object:
    """The value. Raises missing_NAME."""
    if name not in fields:
        raise missing(name, expected)
    return fields[name]


def choice(fields: Body, name: str, choices: Sequence[Value], default: Value) -> Value:
    """One of the choices. Raises invalid_NAME."""
    value = fields.get(name, default)
    if isinstance(value, str) and value in choices:
        return choices[choices.index(value)]
    message = f"{name} must be one of {', '.join(choices)}, got {describe(value)}"
    raise InvalidValueError(message, code=f"invalid_{name}", param=name)


def flag(fields: Body, name: str) -> bool | None:
    """true or false; None if absent. Raises invalid_NAME_type."""
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    message = f"{name} must be true or false, got {describe(value)}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)


def text(fields: Body, name: str) -> str | None:
    """A string of valid Unicode; None if absent. Raises invalid_NAME_type and invalid_unicode."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return checked_text(value, Place(name, name))
    message = f"{name} must be a string, got {describe(value)}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)


def count(fields: Body, name: str, least: int = 1, most: int | None = None) -> int | None:
    """An integer from `least` to `most`; None if absent. Raises invalid_NAME."""
    value = fields.get(name)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (is_integer and value >= least and (most is None or value <= most)):  # type: ignore[operator]
        return value  # type: ignore[return-value]
    expected = f"of {least} or more" if most is None else f"from {least} to {most}"
    message = f"{name} must be an integer {expected}, got {describe(value)}"
    raise InvalidValueError(message, code=f"invalid_{name}", param=name)


def seconds(fields: Body, name: str, default: float, most: float) -> float:
    """A number from 1 to `most`. Raises invalid_NAME."""
    value = fields.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, int | float) and is_number and 1 <= value <= most:
        return float(value)
    message = f"{name} must be a number of seconds of at least 1 and at most {most:g}, got {describe(value)}"
    raise InvalidValueError(message, code=f"invalid_{name}", param=name)


# Fields that a request does not have


class NotServed(NamedTuple):
    """Why some request does not take a field that is known: of another kind of request, or of another server."""

    why: str
    harmless: tuple[object, ...] = ()  # values that change nothing, so that they are accepted


MAX_WARNINGS = 10  # of one kind, about one request
_MAX_NAME = 60  # characters of an unknown field's name that are compared with the known ones


def check_names(fields: Body, served: frozenset[str], known: Mapping[str, NotServed]) -> tuple[str, ...]:
    """Warnings about unknown fields, which are ignored. Raises unsupported_parameter for a known one."""
    if fields.keys() <= served:
        return ()
    unknown = []
    for name, value in fields.items():
        if name not in served:
            if name not in known:
                unknown.append(name)
            elif not any(type(value) is type(each) and value == each for each in known[name].harmless):
                message = f"{name} is not served here: {known[name].why}; leave it out, got {describe(value)}"
                raise InvalidValueError(message, code="unsupported_parameter", param=name)
    return tuple(unknown_warnings(unknown, served))


def unknown_warnings(unknown: Sequence[str], served: Iterable[str]) -> list[str]:
    """One warning for each unknown field, up to a bound."""
    warnings = []
    for name in unknown[:MAX_WARNINGS]:
        close = get_close_matches(name[:_MAX_NAME], served, 1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else ""
        warnings.append(f"the field {quote(name)} is unknown and was ignored{hint}")
    if len(unknown) > MAX_WARNINGS:
        warnings.append(f"{len(unknown) - MAX_WARNINGS} more unknown fields were ignored")
    return warnings


# Kinds of values


class Kind(ABC):
    """The values that a field takes."""

    metavar = "TEXT"  # of the command-line option

    @abstractmethod
    def expected(self) -> str:
        """The values, as a message or a table names them."""

    @abstractmethod
    def schema(self) -> Schema:
        """As JSON Schema."""

    @abstractmethod
    def read(self, fields: Body, name: str) -> object:
        """The value, None if absent. Raises RequestError."""

    @abstractmethod
    def error_code(self, name: str) -> str:
        """The code of the error that a wrong value raises."""


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few names."""

    values: Sequence[str]
    former: Mapping[str, str] = field(default_factory=dict)  # names of old versions, which are still accepted
    metavar = "NAME"

    def expected(self) -> str:
        return ", ".join(f"`{value}`" for value in self.values)

    def schema(self) -> Schema:
        return {"enum": [*self.values, *self.former, None]}

    def read(self, fields: Body, name: str) -> str | None:
        value = fields.get(name)
        if value is None:
            return None
        if isinstance(value, str) and value in self.former:
            return self.former[value]
        return choice(fields, name, self.values, self.values[0])

    def error_code(self, name: str) -> str:
        return f"invalid_{name}"


@dataclass(frozen=True)
class Flag(Kind):
    """true or false."""

    metavar = ""

    def expected(self) -> str:
        return "boolean"

    def schema(self) -> Schema:
        return {"type": ["boolean", "null"]}

    def read(self, fields: Body, name: str) -> bool | None:
        return flag(fields, name)

    def error_code(self, name: str) -> str:
        return f"invalid_{name}_type"


@dataclass(frozen=True)
class Count(Kind):
    """An integer."""

    least: int = 1
    most: int | None = None
    metavar = "N"

    def expected(self) -> str:
        return f"integer of {self.least} or more" if self.most is None else f"integer from {self.least} to {self.most}"

    def schema(self) -> Schema:
        bounds = {"minimum": self.least, **({} if self.most is None else {"maximum": self.most})}
        return {"type": ["integer", "null"], **bounds}

    def read(self, fields: Body, name: str) -> int | None:
        return count(fields, name, self.least, self.most)

    def error_code(self, name: str) -> str:
        return f"invalid_{name}"


@dataclass(frozen=True)
class Text(Kind):
    """A string."""

    def expected(self) -> str:
        return "string"

    def schema(self) -> Schema:
        return {"type": ["string", "null"]}

    def read(self, fields: Body, name: str) -> str | None:
        return text(fields, name)

    def error_code(self, name: str) -> str:
        return f"invalid_{name}_type"


@dataclass(frozen=True)
class Structured(Kind):
    """Lists, or text or token ids. Without a reader, `parse.py` reads it together with other fields."""

    values: str
    json_schema: Schema
    reader: Callable[[object, str], object] | None = None
    code: str = "invalid_{}_type"

    def expected(self) -> str:
        return self.values

    def schema(self) -> Schema:
        return self.json_schema

    def read(self, fields: Body, name: str) -> object:
        value = fields.get(name)
        return value if value is None or self.reader is None else self.reader(value, name)

    def error_code(self, name: str) -> str:
        return self.code.format(name)


# Rows of the table


@dataclass(frozen=True)
class Option:
    """The command-line option of a field."""

    help: str | None = None  # None: the field's description
    names: tuple[str, ...] = ()  # (): --field-name
    metavar: str | None = None  # None: the kind's
    panel: Panel = "Scoring"
    repeats: type | None = None  # the type of one value, where the option may be repeated
    turns_off: bool = False  # the option makes the field false


@dataclass(frozen=True)
class Field:
    """One field of a request."""

    name: str  # in JSON and in Python
    kind: Kind
    about: str  # one sentence
    default: object = None
    is_required: bool = False
    option: Option | None = None  # None: the command line does not have it, or reads it in its own way
    in_python: bool = True  # a parameter of `Scorer.score` or `Scorer.rerank`
    attribute: str | None = ""  # of the request object; "": the same name; None: none, its value is only checked
    dialects: frozenset[str] = frozenset()  # of the rerank routes that take it

    def read(self, fields: Body) -> object:
        """The value, or the default if it is absent. Raises RequestError."""
        value = self.kind.read(fields, self.name)
        return self.default if value is None else value

    def schema(self) -> Schema:
        """As JSON Schema."""
        default = {} if self.is_required else {"default": self.default}
        return {**self.kind.schema(), **default, "description": self.about}


def properties(rows: Iterable[Field]) -> Schema:
    """The properties of the request's JSON Schema."""
    return {row.name: row.schema() for row in rows}


def with_fields(rows: Sequence[Field], options: type) -> Callable[[Method], Method]:
    """Gives a method with `**options` the signature of the fields, and describes them below `Args:` of its docstring.

    `options` is the TypedDict of its keyword arguments. The method raises TypeError for other keyword arguments.
    """
    types = get_type_hints(options)
    fields = [row for row in rows if row.in_python]
    added = [
        inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default, annotation=types[row.name])
        for row in fields
        if row.name in types
    ]

    def extend(method: Method) -> Method:
        written = inspect.signature(method)
        own = [each for each in written.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        positional = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        signature = written.replace(parameters=[*positional, *added, *own[len(positional) :]])

        @wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            return method(*args, **kwargs)

        @wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await checked(*args, **kwargs)

        described: Any = awaited if inspect.iscoroutinefunction(method) else checked
        described.__signature__ = signature
        lines = [f"    {row.name}: {in_python_words(row.about)}" for row in fields]
        text = inspect.cleandoc(method.__doc__ or "")
        if "Args:" not in text:
            text = text.replace("Returns:", "Args:\n\nReturns:", 1)
        described.__doc__ = text.replace("Args:", "\n".join(["Args:", *lines]), 1)
        return cast(Method, described)

    return extend


_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None", "meta.debug": "debug"}


def in_python_words(about: str) -> str:
    """A description of a field in JSON, in Python's words."""
    return re.sub(r"\b(true|false|null|meta\.debug)\b", lambda found: _PYTHON_WORDS[found[0]], about)


def markdown_table(rows: Iterable[Field]) -> str:
    """The fields as a table for the documentation."""
    lines = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        default = "required" if row.is_required else _json(row.default)
        lines.append(f"| `{row.name}` | {row.kind.expected()} | {default} | {row.about} |")
    return "\n".join(lines)


def _json(default: object) -> str:
    if default is None:
        return ""
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"
