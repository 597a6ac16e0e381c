"""`/health`, `/v1/models`, `/server_info`, `/metrics` and TEI's `/info`: the state of the server and its model."""

from __future__ import annotations

import asyncio
import platform
import sys
import time
from dataclasses import asdict
from functools import partial

from starlette.responses import Response

from prefixwise._version import __version__
from prefixwise.contract.errors import ModelNotFoundError, UnavailableError, quote
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.health import STALL_RETRY_SECONDS
from prefixwise.server.context import RequestContext, json_reply
from prefixwise.server.scoring import Completion
from prefixwise.server.service import POOL_THREADS, Service

GENERATE_SECONDS = 20.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PACKAGES = ("numpy", "jax", "jaxlib", "torch", "tokenizers")  # `/server_info` shows the versions of the loaded ones


async def health(service: Service, context: RequestContext) -> Response:
    """200 from the end of the warm-up to the first signal, while the engine scores; else 503, as for every handler that
    needs the engine."""
    return json_reply({"status": "ok"})


async def health_generate(service: Service, context: RequestContext) -> Response:
    """Score one tiny request, and say how long it took."""
    begin = time.monotonic()
    try:
        async with asyncio.timeout(GENERATE_SECONDS):
            await _score_one_item(service.engine, context)
    except TimeoutError:
        message = f"a tiny request must be scored within {GENERATE_SECONDS:g} seconds, and it was not"
        raise UnavailableError(message, code="not_ready", retry_after=STALL_RETRY_SECONDS) from None
    return json_reply({"status": "ok", "milliseconds": round(1000 * (time.monotonic() - begin), 3)})


async def _score_one_item(engine: ScoringEngine, context: RequestContext) -> None:
    prepared = engine.prepare(engine.tiny_request())
    completion = Completion()
    state = engine.submit(prepared, on_change=completion.notify)
    await completion.wait(context, state)
    engine.finish(prepared, state)


async def models(service: Service, context: RequestContext) -> Response:
    """The served names and the LoRA adapters, in the shape of OpenAI's list, with vLLM's `root` and `parent`."""
    return json_reply({"object": "list", "data": _models(service)})


async def model(service: Service, context: RequestContext) -> Response:
    """One entry of the list. Raises model_not_found."""
    name, entries = context.path_params["model"], _models(service)
    for entry in entries:
        if entry["id"] == name:
            return json_reply(entry)
    listed = ", ".join(quote(str(entry["id"])) for entry in entries)
    message = f"model must be one of {listed}, got {quote(name)}"
    raise ModelNotFoundError(message, code="model_not_found", param="model")


def _models(service: Service) -> list[dict[str, object]]:
    engine = service.engine_if_open
    names = service.names.public
    shared = {
        "object": "model",
        "created": int(service.created),
        "owned_by": "prefixwise",
        "max_model_len": None if engine is None else engine.backend.config.max_context_len,
    }
    root = None if engine is None else engine.config.model_name
    return [
        *({"id": name, **shared, "root": root, "parent": None} for name in names),
        *({"id": lora.name, **shared, "root": lora.path, "parent": names[0]} for lora in service.names.loras),
    ]


async def tei_info(service: Service, context: RequestContext) -> Response:
    """The model and its limits, in the shape of Text Embeddings Inference."""
    engine = service.engine
    backend = engine.backend
    return json_reply(
        {
            "model_id": service.names.public[0],
            "model_sha": engine.config.revision,
            "model_dtype": backend.info.dtype,
            "served_model_name": service.names.public[0],
            "model_type": _tei_model_type(engine),
            "max_concurrent_requests": engine.scheduler.admission.max_tokens,  # our limit counts tokens
            "max_input_length": backend.config.max_context_len,
            "max_batch_tokens": backend.info.step_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": engine.config.max_items_per_request,
            "auto_truncate": service.options.auto_truncate,
            "tokenization_workers": POOL_THREADS,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


def _tei_model_type(engine: ScoringEngine) -> dict[str, object]:
    """Rerankers have one label, or none of their own; a classifier that cannot rerank has its classes."""
    choice, labels = engine.config.profiles, engine.backend.config.class_labels
    kind = "reranker" if choice.can_rerank else "classifier"
    names = ("LABEL_0",) if choice.can_rerank else labels
    by_id = {str(row): name for row, name in enumerate(names)}
    return {kind: {"id2label": by_id, "label2id": {name: row for row, name in enumerate(names)}}}


async def metrics(service: Service, context: RequestContext) -> Response:
    """The metrics in Prometheus' text format."""
    others = await service.other_metrics() if service.other_metrics is not None else ()
    text = await service.ask_engine(partial(service.metrics.render, others))
    return Response(text, media_type=_METRICS_TYPE)


async def server_info(service: Service, context: RequestContext) -> Response:
    """The resolved configuration, versions, devices, memory and statistics."""
    return json_reply(await service.ask_engine(partial(_describe_server, service)))


def _describe_server(service: Service) -> dict[str, object]:
    engine = service.engine_if_open
    of_engine = {} if engine is None else _describe_engine(engine)  # its statistics, before its memory
    info: dict[str, object] = {
        "status": service.status,
        "version": __version__,
        "uptime_seconds": round(time.time() - service.created, 3),
        "api_key_set": service.options.api_key is not None,
        "served_model_names": service.names.public,
        "configuration": service.configuration,
        "versions": {**loaded_versions(), **service.engine_versions},
        "memory": {
            "peak_host_bytes": service.peak_host_bytes(),
            "device": {} if engine is None else engine.backend.memory_stats(),
        },
    }
    return {**info, **of_engine}


def _describe_engine(engine: ScoringEngine) -> dict[str, object]:
    backend, stats = engine.backend.info, engine.scheduler.stats()
    return {
        "model": {
            "name": engine.config.model_name,
            "num_parameters": engine.backend.config.num_parameters,
            **asdict(engine.backend.config),
        },
        "devices": {
            "backend": backend.name,
            "device": backend.device,
            "kind": backend.device_kind,
            "dtype": backend.dtype,
            "compute_dtype": backend.compute_dtype or backend.dtype,
            "copies": backend.num_copies,
        },
        "buckets": {
            "token_buckets": backend.token_buckets,
            "token_multiple": backend.token_multiple,
            "token_budget": backend.token_budget,
            "step_tokens": backend.step_tokens,
        },
        "prefix_cache": {
            "enabled": engine.scheduler.options.prefix_cache,
            "block_bytes": stats.block_bytes,
            "blocks": stats.cached_blocks,
            "used_blocks": stats.used_blocks,
            "pinned_blocks": stats.pinned_blocks,
            "capacity_blocks": stats.cache_capacity_blocks,
            "queried_tokens": stats.prefix_queried_tokens,
            "hit_tokens": stats.prefix_hit_tokens,
        },
        "profiles": {
            "default": _profile_name(engine),
            "names": sorted(engine.config.profiles.by_name),
            "warning": engine.config.profiles.warning,
        },
        "max_queued_tokens": engine.scheduler.admission.max_tokens,
        "stats": {**asdict(stats), "fill_ratio": stats.fill_ratio},
    }


def _profile_name(engine: ScoringEngine) -> str | None:
    """The profile of rerank requests that name none."""
    default = engine.config.profiles.default
    return None if default is None else default.name


def loaded_versions() -> dict[str, str]:
    """The versions of the packages that are loaded. It imports none."""
    loaded = {name: sys.modules[name] for name in _PACKAGES if name in sys.modules}
    shown = {name: str(getattr(module, "__version__", "?")) for name, module in loaded.items()}
    return {"prefixwise": __version__, "python": platform.python_version(), **shown}
