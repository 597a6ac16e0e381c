"""The fields of OpenAI's completions, as far as scoring goes: log-probabilities of prompts, and one token more.

`/v1/completions` reads prompts (`echo`), `/v1/chat/completions` reads what follows a chat. Both generate at most one
token, the most likely one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixwise.contract.classify import PROMPT
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, describe
from prefixwise.contract.fields import (
    Body,
    Count,
    Field,
    Flag,
    NotServed,
    Structured,
    Text,
    check_names,
    missing,
    present_fields,
)
from prefixwise.contract.judge import MESSAGES, Message, chat_fields
from prefixwise.contract.known_fields import KNOWN_FIELDS, KNOWN_GENERATION
from prefixwise.contract.ragged import Ragged
from prefixwise.contract.request import MAX_PRIORITY

MAX_LOGPROBS = 20  # the most likely tokens of a position; as vLLM's default, --max-logprobs

_ONE_TOKEN = "this server scores, and generates one token at most, the most likely one"


def _number_of_tokens(*allowed: int) -> Structured:
    """The kind of a field that takes these numbers and no other."""
    listed = " or ".join(map(str, allowed))

    def read(value: object, name: str) -> int:
        if type(value) is int and value in allowed:
            return value
        message = f"{name} must be {listed}: {_ONE_TOKEN}, got {describe(value)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)

    return Structured(listed, {"enum": [*allowed, None]}, read, code="invalid_{}")


def _read_number(value: object, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise InvalidRequestError(
        f"{name} must be a number, got {describe(value)}", code=f"invalid_{name}_type", param=name
    )


_ZERO_OR_ONE, _ONE = _number_of_tokens(0, 1), _number_of_tokens(1)
_NUMBER = Structured("a number", {"type": ["number", "null"]}, _read_number)

_COMMON_FIELDS = (
    Field("n", _ONE, "Choices for each prompt.", 1, attribute=None),
    Field("temperature", _NUMBER, "Has no effect: the token that follows is the most likely one.", attribute=None),
    Field("seed", _NUMBER, "Has no effect: nothing is random.", attribute=None),
    Field("user", Text(), "Has no effect.", attribute=None),
    Field(
        "return_tokens_as_token_ids",
        Flag(),
        "Show each token as `token_id:ID` in place of its text, of which several tokens may have the same.",
        False,
    ),
    Field("priority", Count(0, MAX_PRIORITY), "Requests with lower numbers are served first.", 0),
    Field("request_id", Text(), "The response's id, unless the header X-Request-Id has one."),
    Field("model", Text(), 'A served name; if absent or "default", the served model.'),
)

COMPLETION_FIELDS = (
    Field("prompt", PROMPT, "One text, several, or the token ids of either.", is_required=True),
    Field("max_tokens", _ZERO_OR_ONE, "Tokens to generate: 0, or 1, the most likely one.", is_required=True),
    Field("echo", Flag(), "Return the prompt, too, with the log-probabilities of its tokens.", False),
    Field(
        "logprobs",
        Count(0, MAX_LOGPROBS),
        "Return log-probabilities, at each position also of so many of the most likely tokens.",
    ),
    Field("add_special_tokens", Flag(), "Begin a prompt of text with BOS where the model has one.", True),
    *_COMMON_FIELDS,
)

CHAT_FIELDS = (
    Field("messages", MESSAGES, "The chat, which the model's chat template renders.", is_required=True),
    Field("max_tokens", _ONE, "Tokens to generate: 1, the most likely one.", attribute=None),
    Field("max_completion_tokens", _ONE, "The newer name of max_tokens.", attribute=None),
    Field("logprobs", Flag(), "Return the log-probability of the token.", False),
    Field("top_logprobs", Count(0, MAX_LOGPROBS), "Also those of so many of the most likely tokens.", 0),
    *_COMMON_FIELDS,
)

_KNOWN: Mapping[str, NotServed] = {
    # A `top_k` of sampling never changes the most likely token, so it is unknown here.
    **{name: each for name, each in KNOWN_FIELDS.items() if name != "top_k"},
    **KNOWN_GENERATION,
    "max_completion_tokens": NotServed("its name is `max_tokens`"),
    "top_logprobs": NotServed("`logprobs` says how many of the most likely tokens to return", harmless=(0,)),
    "stream": NotServed(_ONE_TOKEN, harmless=(False,)),
    "stream_options": NotServed(_ONE_TOKEN),
    "stop": NotServed(_ONE_TOKEN, harmless=([], "")),
    "best_of": NotServed(_ONE_TOKEN, harmless=(1,)),
    "suffix": NotServed("a prompt goes on at its end", harmless=("",)),
    "top_p": NotServed("the token that follows is the most likely one", harmless=(1, 1.0)),
    "prompt_logprobs": NotServed("`echo` and `logprobs` return the log-probabilities of a prompt"),
    "truncate_prompt_tokens": NotServed("prompts are never cut"),
    **dict.fromkeys(("tools", "functions"), NotServed("the answer is one token", harmless=([],))),
    **dict.fromkeys(("tool_choice", "function_call"), NotServed("the answer is one token", harmless=("none", "auto"))),
    "response_format": NotServed("the answer is one token", harmless=({"type": "text"},)),
    "modalities": NotServed("only text is read and written", harmless=(["text"],)),
}


@dataclass(frozen=True, eq=False)  # eq: arrays have no single truth value
class CompletionRequest:
    """Prompts, and what to return of them."""

    prompt: tuple[str, ...] | Ragged
    max_tokens: int
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    priority: int = 0
    request_id: str | None = None
    model: str | None = None
    warnings: tuple[str, ...] = ()  # about fields without effect


@dataclass(frozen=True)
class ChatRequest:
    """A chat, and what to return of the token that follows it."""

    messages: tuple[Message, ...]
    logprobs: bool = False
    top_logprobs: int = 0
    return_tokens_as_token_ids: bool = False
    priority: int = 0
    request_id: str | None = None
    model: str | None = None
    warnings: tuple[str, ...] = ()  # about fields without effect


def parse_completion_request(body: object) -> CompletionRequest:
    """Raises a `RequestError` for the first thing wrong."""
    values, warnings = _read(present_fields(body), COMPLETION_FIELDS)
    if values["max_tokens"] == 0 and not values["echo"]:
        message = "max_tokens must be 1, or echo true: without both there is nothing to return, got max_tokens 0"
        raise InvalidValueError(message, code="conflicting_parameters", param="max_tokens")
    return CompletionRequest(**values, warnings=warnings)


def parse_chat_request(body: object) -> ChatRequest:
    """Raises a `RequestError` for the first thing wrong."""
    fields = chat_fields(body)
    if not {"max_tokens", "max_completion_tokens"} & fields.keys():
        raise InvalidValueError(
            f"max_tokens or max_completion_tokens must be 1: {_ONE_TOKEN}, got neither",
            code="invalid_max_tokens",
            param="max_tokens",
        )
    values, warnings = _read(fields, CHAT_FIELDS)
    if values["top_logprobs"] and not values["logprobs"]:
        message = "logprobs must be true where top_logprobs is set, got false"
        raise InvalidValueError(message, code="conflicting_parameters", param="logprobs")
    return ChatRequest(**values, warnings=warnings)


def _read(fields: Body, rows: tuple[Field, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of the request object, and warnings."""
    warnings = check_names(fields, frozenset(row.name for row in rows), _KNOWN)
    for row in rows:
        if row.is_required and row.name not in fields:
            raise missing(row.name, row.kind.expected())
    values = {row.name: row.read(fields) for row in rows}
    if isinstance(fields.get("temperature"), int | float) and fields["temperature"]:
        warnings = (*warnings, "temperature has no effect: the token that follows is the most likely one")
    return {row.name: values[row.name] for row in rows if row.attribute is not None}, warnings
