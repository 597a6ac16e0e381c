"""`/v1/prefix`: compute a query's keys and values now, and keep them for the requests to come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from starlette.responses import Response

from prefixwise.contract.describe import describe, quote
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, NotFoundError
from prefixwise.contract.parse import PLAIN, parse_model_name
from prefixwise.contract.parse_inputs import parse_query
from prefixwise.contract.ragged import Int32Array
from prefixwise.engine.pins import PinnedPrefix
from prefixwise.prompts.profile_choice import DEFAULT
from prefixwise.server import fields
from prefixwise.server.body import decode_object, read_body
from prefixwise.server.call import Call
from prefixwise.server.jobs import run_job, within_deadline
from prefixwise.server.replies import json_reply
from prefixwise.server.scoring import blame_request
from prefixwise.server.service import Service

DEFAULT_TTL_SECONDS = 300.0
MAX_TTL_SECONDS = 86_400.0


async def pin_prefix(service: Service, call: Call) -> Response:
    """Keep a prefix for a while; `cached_tokens` of later requests show that it was."""
    engine = service.engine
    engine.scheduler.admission.check()

    async def work(deadline: float | None) -> Response:
        body = fields.present(decode_object(await read_body(call, service.options.max_request_bytes)))
        strict = service.options.strict_model or body.get("profile") is None  # as the routes that it is for
        name = service.names.answer_to_any(parse_model_name(body), strict=strict)
        query = parse_query(fields.required(body, "query", "a string or a list of token ids"))
        ttl = fields.seconds(body, "ttl_seconds", DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS)
        prefix_ids = await service.in_pool(partial(blame_request, _preparation(service, body, query)))
        submit = partial(engine.submit_prefix, prefix_ids, ttl_seconds=ttl, deadline=deadline)
        job = await run_job(call, lambda on_change: submit(on_change=on_change))
        return json_reply(_describe(engine.finish_prefix(job), name))

    return await within_deadline(call, service.options.request_timeout, work)


def _preparation(service: Service, body: Mapping[str, object], query: str | Int32Array) -> Callable[[], Int32Array]:
    """What makes the prefix of the requests to come: to score, or by a profile to rerank. Raises RequestError."""
    profile, instruction = fields.text(body, "profile"), fields.text(body, "instruction")
    own = service.engine.config.profiles.default
    if profile == DEFAULT and own is not None and not own.can_rerank:
        profile = own.name
    if profile in (None, PLAIN):
        if instruction is not None:
            message = f"instruction is for a profile's prompt: expected `profile` beside it, got {describe(profile)}"
            raise InvalidValueError(message, code="conflicting_parameters", param="instruction")
        return partial(service.engine.prepare_prefix, query)
    if not isinstance(query, str):
        message = "query must be a string where a profile makes the prompt, got token ids"
        raise InvalidRequestError(message, code="invalid_query_type", param="query")
    return partial(service.reranker.prepare_prefix, query, profile, instruction)


async def list_prefixes(service: Service, call: Call) -> Response:
    """All that are kept now."""
    name = service.names.answer_to(None)
    pinned = service.engine.pinned_prefixes()
    return json_reply({"object": "list", "data": [_describe(prefix, name) for prefix in pinned]})


async def release_prefix(service: Service, call: Call) -> Response:
    """Let one go before its time."""
    prefix_id = call.path_params["prefix_id"]
    if not service.engine.release_prefix(prefix_id):
        message = f"no prefix is kept under the id {quote(prefix_id)}; GET /v1/prefix lists those that are"
        raise NotFoundError(message, code="not_found", param="id")
    return json_reply({"object": "prefix", "id": prefix_id, "deleted": True})


def _describe(prefix: PinnedPrefix, name: str) -> dict[str, object]:
    return {
        "object": "prefix",
        "id": prefix.id,
        "model": name,
        "tokens": prefix.num_tokens,
        "cached_tokens": prefix.cached_tokens,
        "bytes": prefix.num_bytes,
        "ttl_seconds": prefix.ttl_seconds,
    }
