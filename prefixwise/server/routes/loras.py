"""Load and unload LoRA adapters while the server runs, as vLLM's and SGLang's routes do it.

A folder on the server's disk is read for a client, so the routes need `--allow-runtime-lora-updating`, beside the API
key where there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from starlette.responses import PlainTextResponse, Response

from prefixwise.contract import fields
from prefixwise.contract.errors import ForbiddenError, RequestError
from prefixwise.server.context import RequestContext, json_reply
from prefixwise.server.routes.tokens import read_fields
from prefixwise.server.service import Service

Body = Mapping[str, object]

_LOAD_FIELDS = ("lora_name", "lora_path", "load_inplace")
_UNLOAD_FIELDS = ("lora_name",)


async def load_lora(service: Service, context: RequestContext) -> Response:
    """vLLM's `/v1/load_lora_adapter`: the answer is a text."""
    name = await _load(service, context)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora(service: Service, context: RequestContext) -> Response:
    """vLLM's `/v1/unload_lora_adapter`."""
    name = await _unload(service, context)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def load_lora_sglang(service: Service, context: RequestContext) -> Response:
    """SGLang's `/load_lora_adapter`: the answer has the adapters that are loaded now."""
    context.error_body = _sglang_error
    await _load(service, context)
    return _sglang_reply(service)


async def unload_lora_sglang(service: Service, context: RequestContext) -> Response:
    """SGLang's `/unload_lora_adapter`."""
    context.error_body = _sglang_error
    await _unload(service, context)
    return _sglang_reply(service)


def _sglang_reply(service: Service) -> Response:
    loaded = {lora.name: lora.path for lora in service.engine.loras.listed()}
    return json_reply({"success": True, "error_message": "", "loaded_adapters": loaded})


def _sglang_error(error: RequestError) -> object:
    return {**error.to_body(), "success": False, "error_message": error.message}


async def _load(service: Service, context: RequestContext) -> str:
    """Returns the name. Raises RequestError."""
    body = await _read(service, context, _LOAD_FIELDS)
    name, path = _text(body, "lora_name"), _text(body, "lora_path")
    in_place = fields.flag(body, "load_inplace") or False
    await _on_a_thread(partial(service.engine.load_lora, name, path, in_place=in_place))
    return name


async def _unload(service: Service, context: RequestContext) -> str:
    """Returns the name. Raises RequestError."""
    name = _text(await _read(service, context, _UNLOAD_FIELDS), "lora_name")
    await _on_a_thread(partial(service.engine.loras.unload, name))
    return name


async def _read(service: Service, context: RequestContext, known: tuple[str, ...]) -> Body:
    if not service.options.allow_runtime_lora_updating:
        message = "this server does not load or unload LoRA adapters: it was not started with "
        raise ForbiddenError(message + "--allow-runtime-lora-updating", code="lora_updating_disabled")
    body, _, _ = await read_fields(service, context, known)
    return body


def _text(body: Body, name: str) -> str:
    fields.required(body, name, "a string")
    found = fields.text(body, name)
    assert found is not None, "`required` has seen it"
    return found


async def _on_a_thread(work: Callable[[], object]) -> None:
    """The device is waited for, and files are read."""
    await asyncio.to_thread(work)
