"""`POST /tokenize`: which tokens a text is, by the tokenizer that scores it."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError
from prefixwise.contract.parse import parse_model_name
from prefixwise.prompts.tokenizer import TextTokenizer
from prefixwise.server import fields
from prefixwise.server.body import decode_object, read_body
from prefixwise.server.call import Call
from prefixwise.server.jobs import within_deadline
from prefixwise.server.replies import json_reply
from prefixwise.server.service import Service


async def tokenize(service: Service, call: Call) -> Response:
    """The ids of one text, or of each of many."""

    async def work(deadline: float | None) -> Response:
        return await _tokenize(service, call)

    return await within_deadline(call, service.options.request_timeout, work)


async def _tokenize(service: Service, call: Call) -> Response:
    body = fields.present(decode_object(await read_body(call, service.options.max_request_bytes)))
    name = service.names.answer_to(parse_model_name(body))
    text = _text(body)
    texts = _texts(text)
    add_special_tokens = fields.flag(body, "add_special_tokens")
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer, so no text can be tokenized", code="no_tokenizer")
    rows = await service.in_pool(partial(_encode, tokenizer, texts, add_special_tokens))
    counts = [len(row) for row in rows]
    is_one = isinstance(text, str)
    return json_reply(
        {
            "model": name,
            "tokens": rows[0] if is_one else rows,
            "count": counts[0] if is_one else counts,
            "max_model_len": service.engine.backend.config.max_context_len,
        }
    )


def _text(body: dict[str, object]) -> object:
    if "text" in body and "prompt" in body:
        message = "text and prompt are two names for one thing: expected one of them, got both"
        raise InvalidValueError(message, code="conflicting_parameters", param="text")
    return body["prompt"] if "prompt" in body else fields.required(body, "text", "a string or a list of strings")


def _encode(tokenizer: TextTokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    leading = tokenizer.leading_ids.tolist() if add_special_tokens else []
    return [leading + row.tolist() for row in tokenizer.encode_many(texts)]


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        message = f"text must be a string or a list of strings, got {describe(value)}"
        raise InvalidRequestError(message, code="invalid_text_type", param="text")
    if not value:
        raise InvalidValueError("text must hold at least one text, got an empty list", code="empty_text", param="text")
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            message = f"text[{index}] must be a string, got {describe(entry)}"
            raise InvalidRequestError(message, code="invalid_text_type", param="text")
    return value
