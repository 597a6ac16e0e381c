"""`/v1/prefix`: cache the KV blocks of a query ahead of its requests. `/tokenize`, `/detokenize`, `/tokenizer_info`:
the tokens of a text, the text of tokens, and what clients must know of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from starlette.responses import Response

from prefixwise.contract import fields
from prefixwise.contract.checks import check_token_count
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, NotFoundError, describe, quote
from prefixwise.contract.inputs import Place, checked_text, parse_ids, parse_query, vocabulary_error
from prefixwise.contract.known_fields import KNOWN_FIELDS
from prefixwise.contract.ragged import Int32Array
from prefixwise.contract.request import PLAIN
from prefixwise.engine.prefix_cache import PinnedPrefix
from prefixwise.prompts.profile_choice import DEFAULT
from prefixwise.prompts.tokenizer import TextTokenizer
from prefixwise.server.context import RequestContext, decode_object, json_reply, read_body
from prefixwise.server.dialects.base import add_warnings, map_tokenizer_error
from prefixwise.server.scoring import LARGE_BYTES, Completion, time_limit
from prefixwise.server.service import Service

DEFAULT_TTL_SECONDS = 300.0
MAX_TTL_SECONDS = 86_400.0
MAX_TOKENIZED = 1 << 20  # tokens of one response of /tokenize

Body = Mapping[str, object]
Warnings = dict[str, list[str]]  # `warnings` of a response, or nothing

_PREFIX_FIELDS = ("query", "ttl_seconds", "profile", "instruction", "model")
_NOT_PINNED = {
    "query_embed_overrides": fields.NotServed("a prefix is pinned with its tokens' own embeddings"),
    **{name: KNOWN_FIELDS[name] for name in ("cache_salt", "lora_path")},
}
_TOKENIZE_FIELDS = ("text", "prompt", "add_special_tokens", "model")
_NOT_TOKENIZED = {
    "messages": fields.NotServed("no chat template is applied, send the text that it gives as `text`"),
    "return_token_strs": fields.NotServed("/detokenize has the text of tokens", harmless=(False,)),
}
_DETOKENIZE_FIELDS = ("tokens", "model")


async def pin_prefix(service: Service, context: RequestContext) -> Response:
    """Compute a query's keys and values, and pin them in the KV cache. Later requests count them as `cached_tokens`."""
    engine = service.engine
    engine.scheduler.admission.check()
    async with time_limit(context, service.options.request_timeout) as deadline:
        body, warnings, is_large = await read_fields(service, context, _PREFIX_FIELDS, _NOT_PINNED)
        strict = service.options.strict_model or body.get("profile") is None  # as the requests that will use the prefix
        model = service.names.answer_to_any(fields.text(body, "model"), strict=strict)
        ttl = fields.seconds(body, "ttl_seconds", DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS)
        prefix_ids = await service.in_pool(partial(_prepare_prefix, service, body), is_large=is_large)
        completion = Completion()
        state = engine.submit_prefix(
            prefix_ids,
            ttl_seconds=ttl,
            deadline=deadline,
            on_change=completion.notify,
            lora=engine.lora_of(model),
        )
        await completion.wait(context, state)
        return json_reply({**_describe(engine.finish_prefix(state), model), **warnings})


def _prepare_prefix(service: Service, body: Body) -> Int32Array:
    """The prefix of later requests: a query to score, or a profile's prompt to rerank. Raises RequestError."""
    query = parse_query(fields.required(body, "query", "a string or a list of token ids"))
    profile, instruction = fields.text(body, "profile"), fields.text(body, "instruction")
    default = service.engine.config.profiles.default
    if profile == DEFAULT and default is not None and not default.can_rerank:
        profile = default.name
    with map_tokenizer_error():
        if profile not in (None, PLAIN):
            if not isinstance(query, str):
                message = "query must be a string where a profile makes the prompt, got token ids"
                raise InvalidRequestError(message, code="invalid_query_type", param="query")
            return service.reranker.prepare_prefix(query, profile, instruction)
        if instruction is not None:
            message = f"instruction is for a profile's prompt: expected `profile` beside it, got {describe(profile)}"
            raise InvalidValueError(message, code="conflicting_parameters", param="instruction")
        return service.engine.prepare_prefix(query)


async def list_prefixes(service: Service, context: RequestContext) -> Response:
    """All pinned prefixes."""
    model = service.names.answer_to(None)
    pinned = await service.ask_engine(service.engine.pinned_prefixes)
    return json_reply({"object": "list", "data": [_describe(prefix, model) for prefix in pinned]})


async def release_prefix(service: Service, context: RequestContext) -> Response:
    """Unpin a prefix before its time is up."""
    prefix_id = context.path_params["prefix_id"]
    if not await service.ask_engine(partial(service.engine.release_prefix, prefix_id)):
        message = f"no prefix is pinned under the id {quote(prefix_id)}; GET /v1/prefix lists the pinned ones"
        raise NotFoundError(message, code="not_found", param="id")
    return json_reply({"object": "prefix", "id": prefix_id, "deleted": True})


def _describe(prefix: PinnedPrefix, model: str) -> dict[str, object]:
    return {
        "object": "prefix",
        "id": prefix.id,
        "model": model,
        "tokens": prefix.num_tokens,
        "cached_tokens": prefix.cached_tokens,
        "bytes": prefix.num_bytes,
        "ttl_seconds": prefix.ttl_seconds,
    }


async def tokenize(service: Service, context: RequestContext) -> Response:
    """The token ids of one text, or of each of many, by the tokenizer that scoring uses."""
    async with time_limit(context, service.options.request_timeout):
        body, warnings, is_large = await read_fields(service, context, _TOKENIZE_FIELDS, _NOT_TOKENIZED)
        model = service.names.answer_to(fields.text(body, "model"))
        tokenizer = _tokenizer_of(service)
        answer = {"model": model, "max_model_len": service.engine.backend.config.max_context_len, **warnings}
        return await service.in_pool(partial(_tokenize, tokenizer, body, answer), is_large=is_large)


def _tokenize(tokenizer: TextTokenizer, body: Body, answer: Body) -> Response:
    text = _text(body)
    is_one = isinstance(text, str)
    ids = _encode(tokenizer, _texts(text), fields.flag(body, "add_special_tokens") or False)
    counts = [len(each) for each in ids]
    return json_reply({"tokens": ids[0] if is_one else ids, "count": counts[0] if is_one else counts, **answer})


def _text(body: Body) -> object:
    if "text" in body and "prompt" in body:
        message = "text and prompt are two names of one field: expected one of them, got both"
        raise InvalidValueError(message, code="conflicting_parameters", param="text")
    return body["prompt"] if "prompt" in body else fields.required(body, "text", "a string or a list of strings")


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


def _encode(tokenizer: TextTokenizer, texts: list[str], add_special_tokens: bool) -> list[Int32Array]:
    for index, text in enumerate(texts):
        tokenizer.check_len(checked_text(text, Place(f"text[{index}]", "text")), Place(f"text[{index}]", "text"))
    leading = tokenizer.leading_ids if add_special_tokens else tokenizer.leading_ids[:0]
    rows = tokenizer.encode_many(texts)
    check_token_count(len(rows.flat) + len(rows) * len(leading), "text", MAX_TOKENIZED)
    return [np.concatenate([leading, ids]) for ids in rows]


async def detokenize(service: Service, context: RequestContext) -> Response:
    """The text of token ids, as vLLM's `/detokenize`."""
    async with time_limit(context, service.options.request_timeout):
        body, warnings, is_large = await read_fields(service, context, _DETOKENIZE_FIELDS)
        service.names.answer_to(fields.text(body, "model"))
        tokenizer = _tokenizer_of(service)
        vocab_size = service.engine.backend.config.vocab_size
        text = await service.in_pool(partial(_detokenize, tokenizer, body, vocab_size), is_large=is_large)
        return json_reply({"prompt": text, **warnings})


def _detokenize(tokenizer: TextTokenizer, body: Body, vocab_size: int) -> str:
    sent = fields.required(body, "tokens", "a list of token ids")
    if not isinstance(sent, list):
        message = f"tokens must be a list of token ids, got {describe(sent)}"
        raise InvalidRequestError(message, code="invalid_tokens_type", param="tokens")
    check_token_count(len(sent), "tokens", MAX_TOKENIZED)
    place = Place("tokens", "tokens")
    token_ids = parse_ids(sent, place)
    unknown = token_ids[token_ids >= vocab_size]
    if len(unknown):
        raise vocabulary_error(int(unknown[0]), place, f"of token ids below {vocab_size}")
    return tokenizer.decode(token_ids)


async def tokenizer_info(service: Service, context: RequestContext) -> Response:
    """What clients that count tokens must know, as vLLM's `/tokenizer_info`."""
    tokenizer = _tokenizer_of(service)
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"))
    return json_reply(
        {
            **roles,
            **tokenizer.special_tokens,
            "add_bos_token": bool(len(tokenizer.leading_ids)),
            "chat_template": tokenizer.chat_template,
            "model_max_length": service.engine.backend.config.max_context_len,
            "vocab_size": service.engine.backend.config.vocab_size,
        }
    )


def _tokenizer_of(service: Service) -> TextTokenizer:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer, so no text can be tokenized", code="no_tokenizer")
    return tokenizer


async def read_fields(
    service: Service,
    context: RequestContext,
    served: tuple[str, ...],
    known: Mapping[str, fields.NotServed] | None = None,
) -> tuple[Body, Warnings, bool]:
    """The fields, for the response the warnings about unknown ones, and whether the body is large.

    Raises unsupported_parameter for a field of `known`.
    """
    content = await read_body(context, service.options.max_request_bytes)
    is_large = len(content) >= LARGE_BYTES
    decode = partial(decode_object, content)
    body = fields.present_fields(await service.in_pool(decode, is_large=True) if is_large else decode())
    warnings = list(fields.check_names(body, frozenset(served), known or {}))
    add_warnings(context, warnings)
    return body, {"warnings": warnings} if warnings else {}, is_large
