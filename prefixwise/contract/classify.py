"""The fields of requests that classify or embed inputs, one row each, and the object that parsing makes of them.

An input is a whole text or a whole list of token ids: there is no query. The names are those of vLLM's `/classify`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, describe
from prefixwise.contract.fields import (
    Choice,
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
from prefixwise.contract.inputs import Place, checked_text, parse_ids, plain_list
from prefixwise.contract.known_fields import KNOWN_FIELDS
from prefixwise.contract.ragged import Ragged
from prefixwise.contract.request import IDS, MAX_PRIORITY, TruncationSide

LONGEST = -1  # of `truncate_prompt_tokens`: as many tokens as the model takes


def _read_inputs(value: object, name: str) -> tuple[str, ...] | Ragged:
    """One text, several, the token ids of one input, or those of several. Raises RequestError."""
    if isinstance(value, str):
        return _texts([value], name, [name])
    if not isinstance(value, list | tuple):
        message = f"{name} must be {PROMPT.values}, got {describe(value)}"
        raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)
    entries = plain_list(value)
    if not entries:
        raise _empty(name, name, value)
    places = [f"{name}[{index}]" for index in range(len(entries))]
    if isinstance(entries[0], str):
        return _texts(entries, name, places)
    if not isinstance(entries[0], list | tuple):
        return Ragged.from_sequences([parse_ids(entries, Place(name, name))])
    return _id_lists(entries, name, places)


def _texts(entries: Sequence[object], name: str, places: Sequence[str]) -> tuple[str, ...]:
    texts = []
    for index, (entry, place) in enumerate(zip(entries, places, strict=True)):
        if not isinstance(entry, str):
            message = f"{place} must be a string as {places[0]} is one, got {describe(entry)}"
            raise InvalidRequestError(message, code="mixed_input_types", param=name)
        if not entry:
            raise _empty(place, name, entry)
        texts.append(checked_text(entry, Place(place, name, index)))
    return tuple(texts)


def _id_lists(entries: Sequence[object], name: str, places: Sequence[str]) -> Ragged:
    lists = []
    for index, (entry, place) in enumerate(zip(entries, places, strict=True)):
        if not isinstance(entry, list | tuple):
            message = f"{place} must be a list of token ids as {places[0]} is one, got {describe(entry)}"
            raise InvalidRequestError(message, code="mixed_input_types", param=name)
        if not entry:
            raise _empty(place, name, entry)
        lists.append(parse_ids(entry, Place(place, name, index)))
    return Ragged.from_sequences(lists)


def _empty(place: str, name: str, value: object) -> InvalidValueError:
    message = f"{place} must hold at least one character or token id, got {describe(value)}"
    return InvalidValueError(message, code=f"empty_{name}", param=name)


def _read_truncation(value: object, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and (value == LONGEST or value >= 1):
        return value
    message = f"{name} must be {LONGEST} or an integer of 1 or more, got {describe(value)}"
    raise InvalidValueError(message, code=f"invalid_{name}", param=name)


PROMPT = Structured(
    "a string, a list of strings, a list of token ids or a list of such lists",
    {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            {**IDS, "minItems": 1},
            {"type": "array", "items": {**IDS, "minItems": 1}, "minItems": 1},
        ]
    },
    _read_inputs,
)

CLASSIFY_FIELDS = (
    Field("input", PROMPT, "What to classify: one text, several, or the token ids of either.", is_required=True),
    Field(
        "query",
        Text(),
        "For a guard (Llama Guard, ShieldGemma) only: the user's message. The inputs are then responses to it; without "
        "it they are users' messages.",
    ),
    Field(
        "use_activation",
        Flag(),
        "true: numbers by the model's problem_type (softmax, sigmoid or none); false: logits.",
        True,
    ),
    Field(
        "add_special_tokens",
        Flag(),
        "Put the special tokens that the tokenizer adds (BOS, EOS) around each text. Token ids stay as they are.",
        True,
    ),
    Field(
        "truncate_prompt_tokens",
        Structured(
            f"{LONGEST} or integer of 1 or more",
            {"anyOf": [{"const": LONGEST}, {"type": "integer", "minimum": 1}, {"type": "null"}]},
            _read_truncation,
            code="invalid_{}",
        ),
        f"Cut longer inputs to this many tokens, special tokens counted; {LONGEST}: to as many as the model takes. If "
        "absent, an input that does not fit is an error.",
    ),
    Field("truncation_side", Choice(get_args(TruncationSide)), "The end of a long input to cut.", "right"),
    Field("priority", Count(0, MAX_PRIORITY), "Requests with lower numbers are served first.", 0, in_python=False),
    Field("request_id", Text(), "The response's id, unless the header X-Request-Id has one.", in_python=False),
    Field("user", Text(), "Has no effect.", in_python=False, attribute=None),
    Field("model", Text(), 'A served name; if absent or "default", the served model.', in_python=False),
)

EMBED_FIELDS = (
    *(row for row in CLASSIFY_FIELDS if row.name not in ("query", "use_activation")),
    Field(
        "encoding_format",
        Choice(("float", "base64")),
        "float: lists of numbers; base64: their bytes, float32 and little-endian.",
        "float",
        in_python=False,
        attribute=None,
    ),
)


_TEMPLATE = NotServed("no chat template is applied: send the text that it gives as input", harmless=(False, {}))
_KNOWN = {
    **KNOWN_FIELDS,
    **dict.fromkeys(("messages", "chat_template", "chat_template_kwargs"), _TEMPLATE),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "media_io_kwargs"), _TEMPLATE),
}
_EMBED_KNOWN = {
    **_KNOWN,
    "normalize": NotServed("hidden states are not normalised to a length", harmless=(False,)),
    "embed_dtype": NotServed("numbers are float32", harmless=("float32",)),
    "endianness": NotServed("numbers are little-endian", harmless=("little", "native")),
}


class EmbedOptions(TypedDict, total=False):
    """The keyword arguments of `Scorer.embed`."""

    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide


class ClassifyOptions(EmbedOptions, total=False):
    """The keyword arguments of `Scorer.classify`."""

    query: str | None
    use_activation: bool


@dataclass(frozen=True, eq=False)  # eq: arrays have no single truth value
class ClassifyRequest:
    """Inputs to classify or to embed: texts, or token ids."""

    input: tuple[str, ...] | Ragged
    query: str | None = None
    use_activation: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = "right"
    priority: int = 0
    request_id: str | None = None
    model: str | None = None
    warnings: tuple[str, ...] = ()  # about unknown fields

    @property
    def num_items(self) -> int:
        return len(self.input)


def parse_classify_request(body: object) -> ClassifyRequest:
    """Raises a `RequestError` for the first thing wrong."""
    return _parse(body, CLASSIFY_FIELDS, _KNOWN)


def parse_embed_request(body: object) -> ClassifyRequest:
    """Raises a `RequestError` for the first thing wrong."""
    return _parse(body, EMBED_FIELDS, _EMBED_KNOWN)


def _parse(body: object, rows: tuple[Field, ...], known: Mapping[str, NotServed]) -> ClassifyRequest:
    fields = present_fields(body)
    warnings = check_names(fields, frozenset(row.name for row in rows), known)
    if "input" not in fields:
        raise missing("input", PROMPT.values)
    values: dict[str, Any] = {row.name: row.read(fields) for row in rows}
    used = {row.name: values[row.name] for row in rows if row.attribute is not None}
    return ClassifyRequest(**used, warnings=warnings)
