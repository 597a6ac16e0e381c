"""`/v1/models`, `/server_info` and `/metrics`: what is served here, how, and how it goes. They answer at any time."""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import asdict

from starlette.responses import Response

from prefixwise._version import __version__
from prefixwise.engine.engine import ScoringEngine
from prefixwise.host import peak_memory_bytes
from prefixwise.server.call import Call
from prefixwise.server.replies import json_reply
from prefixwise.server.service import POOL_THREADS, Service

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PACKAGES = ("numpy", "jax", "jaxlib", "torch", "tokenizers")  # whose versions are told where they are loaded


async def models(service: Service, call: Call) -> Response:
    """In the shape of OpenAI's list; one entry for every served name."""
    engine = service.engine_if_open
    names = service.names.public
    shared = {
        "object": "model",
        "created": int(service.created),
        "owned_by": "prefixwise",
        "root": None if engine is None else engine.config.model_name,
        "max_model_len": None if engine is None else engine.backend.config.max_context_len,
    }
    return json_reply({"object": "list", "data": [{"id": name, **shared} for name in names]})


async def tei_info(service: Service, call: Call) -> Response:
    """What clients of Text Embeddings Inference ask before their first request."""
    engine = service.engine
    backend = engine.backend
    label = "LABEL_0"
    return json_reply(
        {
            "model_id": service.names.public[0],
            "model_sha": None,
            "model_dtype": backend.info.dtype,
            "model_type": {"reranker": {"id2label": {"0": label}, "label2id": {label: 0}}},
            "max_concurrent_requests": engine.scheduler.admission.max_tokens,  # the bound is one of tokens
            "max_input_length": backend.config.max_context_len,
            "max_batch_tokens": backend.info.step_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": engine.config.max_items_per_request,
            "auto_truncate": False,
            "tokenization_workers": POOL_THREADS,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


async def metrics(service: Service, call: Call) -> Response:
    """Prometheus' text format."""
    return Response(service.metrics.render(), media_type=_METRICS_TYPE)


async def server_info(service: Service, call: Call) -> Response:
    """All that one needs to run the same again, and to see how it goes."""
    engine = service.engine_if_open
    info: dict[str, object] = {
        "status": service.lifecycle.phase.value,
        "version": __version__,
        "uptime_seconds": round(time.time() - service.created, 3),
        "api_key_set": service.options.api_key is not None,
        "served_model_names": service.names.public,
        "configuration": service.configuration,
        "versions": _versions(),
        "memory": {
            "peak_host_bytes": peak_memory_bytes(),
            "device": {} if engine is None else engine.backend.memory_stats(),
        },
    }
    if engine is not None:
        info.update(_describe_engine(engine))
    return json_reply(info)


def _describe_engine(engine: ScoringEngine) -> dict[str, object]:
    backend, stats = engine.backend.info, engine.scheduler.stats()
    return {
        "model": {"name": engine.config.model_name, **asdict(engine.backend.config)},
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
        "profiles": {"default": _profile_name(engine), "names": sorted(engine.config.profiles.by_name)},
        "max_queued_tokens": engine.scheduler.admission.max_tokens,
        "stats": {**asdict(stats), "fill_ratio": stats.fill_ratio},
    }


def _profile_name(engine: ScoringEngine) -> str | None:
    """Of rerank requests that name none."""
    default = engine.config.profiles.default
    return None if default is None else default.name


def _versions() -> dict[str, str]:
    """Of what is loaded; nothing is imported for it."""
    loaded = {name: sys.modules[name] for name in _PACKAGES if name in sys.modules}
    shown = {name: str(getattr(module, "__version__", "?")) for name, module in loaded.items()}
    return {"prefixwise": __version__, "python": platform.python_version(), **shown}
