"""All options of an engine in one place, for `Scorer`, the command line and the server.

EngineOptions -> backend_options()     backend, device, dtype
              -> plan_options()        how requests are split into forwards
              -> scheduler_options()   KV cache between requests, queue
              -> engine_config()       names, limits and profile of all requests
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.request import Algorithm
from prefixwise.forward.backend import BackendOptions, Warmup
from prefixwise.models.lora import MAX_RANK
from prefixwise.plan.algorithms import MaskOption, PlanOptions

if TYPE_CHECKING:
    from prefixwise.engine.prepare import EngineConfig
    from prefixwise.engine.scheduler import SchedulerOptions
    from prefixwise.prompts.profile_choice import ProfileChoice

LEAST_MAX_RANK = 16  # of adapters that may be loaded later
NO_BOUND = -1  # `chunked_prefill_size` as SGLang's command lines spell None


@dataclass(frozen=True)
class EngineOptions:
    """The options as given. An illegal value is an error at once, before a model is loaded."""

    model: str | Path | None = None  # a folder, a .gguf file or a hub id; None: the embedded model
    backend: str = "auto"  # auto, jax, torch
    device: str = "auto"  # auto, cpu, cuda, gpu, tpu, or one of them with a number: cuda:1
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    tp_size: int = 1  # tensor parallelism: devices that share every layer
    dp_size: int = 1  # data parallelism: copies of the model
    nnodes: int = 1  # hosts that share the model, with a process on each (JAX)
    node_rank: int = 0  # of this process
    dist_init_addr: str | None = None  # host:port on rank 0
    batch_invariant: bool | None = None  # the same bits at every batch size; None: where it costs nothing
    quantization: str | None = None  # fp8: linear layers in FP8, quantised while they are loaded
    kv_cache_dtype: str = "auto"  # fp8 (fp8_e4m3): the KV cache in FP8, which holds twice as many prefixes
    prefix_attention_dtype: str = "auto"  # fp8: queries and prefixes' keys in FP8
    attention: str | None = None  # the name of an implementation; None: the best that runs
    warmup: Warmup = "none"  # which programs are compiled before the first request
    compilation_cache_dir: str | Path | None = None  # JAX only; None: the user's cache folder, on accelerators
    weight_cache: bool = True  # cache dequantised weights on disk, in the user's cache folder, for the next start
    prefix_cache_bytes: int | None = None  # KV cache on each device; None: chosen for the device
    prefix_cache: bool = True  # cache prefixes between requests
    chunked_prefill_size: int | None = None  # most tokens of one request's prefix in a step; None, -1: no bound
    max_queued_tokens: int | None = None  # most tokens waiting and running; None: chosen for the device
    watchdog_timeout: float = 0.0  # seconds of a step after which the device counts as hung; 0: never
    algorithm: Algorithm = "auto"  # what `auto` in a request means
    mask: MaskOption = "auto"  # of packed sequences
    segment_fallback_threshold: int = 32_768  # mask `auto`: segment up to this packed length
    chunk_size: int | None = None  # most items in a packed sequence or a forward; 0: no bound; None: from the geometry
    token_budget: int | None = None  # most tokens in one forward; None: the device's default
    delimiter_token_id: int | None = None  # a token between the query and every item; None: no token
    max_items_per_request: int = 100_000  # more are an error
    profile: str | Path | None = None  # how documents become prompts: a name or a .toml file; None: by the model's name
    served_names: tuple[str, ...] = ()  # further names that requests may call the model by; the first is its own
    lora: tuple[str, ...] = ()  # LoRA adapters that are loaded at start: NAME=FOLDER
    max_loras: int | None = None  # adapters that fit at a time; None: those that are loaded at start
    max_lora_rank: int | None = None  # None: the largest of the adapters that are loaded at start, and at least 16

    def __post_init__(self) -> None:
        for name in ("model", "compilation_cache_dir"):
            _check(_is_path(getattr(self, name)), name, getattr(self, name))
        for name in ("prefix_cache", "weight_cache"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name))
        _check(isinstance(self.batch_invariant, bool | None), "batch_invariant", self.batch_invariant)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            _check(value is None or _is_at_least(value, least), name, value)
        _check(self.chunked_prefill_size != 0, "chunked_prefill_size", 0)
        _check(self.max_items_per_request is not None, "max_items_per_request", None)
        _check(_are_names(self.served_names), "served_names", self.served_names)
        _check(_is_seconds(self.watchdog_timeout), "watchdog_timeout", self.watchdog_timeout)
        self._check_loras()
        self.backend_options()
        self.plan_options()

    def _check_loras(self) -> None:
        is_named = isinstance(self.lora, tuple) and all(isinstance(each, str) and _named(each) for each in self.lora)
        _check(is_named, "lora", self.lora)
        names = [name for name, _ in self.lora_folders()]
        _check(len(set(names)) == len(names), "lora", self.lora)
        _check(self.max_loras is None or self.max_loras >= len(names), "max_loras", self.max_loras)
        _check(self.max_lora_rank is None or self.max_lora_rank <= MAX_RANK, "max_lora_rank", self.max_lora_rank)

    def lora_folders(self) -> list[tuple[str, str]]:
        """Names and folders of the adapters that are loaded at start."""
        return [(name, folder) for name, _, folder in (each.partition("=") for each in self.lora)]

    def backend_options(self) -> BackendOptions:
        """Raises BackendError for a value that no backend takes."""
        folder = self.compilation_cache_dir
        return BackendOptions(
            backend=self.backend,
            device=self.device,
            dtype=self.dtype,
            tp_size=self.tp_size,
            dp_size=self.dp_size,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            dist_init_addr=self.dist_init_addr,
            batch_invariant=self.batch_invariant,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            prefix_attention_dtype=self.prefix_attention_dtype,
            token_budget=self.token_budget,
            attention=self.attention,
            prefix_cache_bytes=self.prefix_cache_bytes,
            compilation_cache_dir=None if folder is None else str(folder),
            weight_cache=self.weight_cache,
            warmup=self.warmup,
            max_loras=len(self.lora) if self.max_loras is None else self.max_loras,
            max_lora_rank=self.max_lora_rank or LEAST_MAX_RANK,
        )

    def plan_options(self) -> PlanOptions:
        """Raises InvalidValueError for a value that no plan takes."""
        return PlanOptions(
            algorithm=self.algorithm,
            mask=self.mask,
            segment_fallback_threshold=self.segment_fallback_threshold,
            chunk_size=self.chunk_size,
            token_budget=self.token_budget,
        )

    def scheduler_options(self) -> SchedulerOptions:
        from prefixwise.engine.scheduler import SchedulerOptions

        size = self.chunked_prefill_size
        return SchedulerOptions(
            prefix_cache=self.prefix_cache,
            chunked_prefill_size=None if size == NO_BOUND else size,
            max_queued_tokens=self.max_queued_tokens,
            watchdog_timeout=self.watchdog_timeout,
        )

    def engine_config(
        self,
        model_name: str,
        profiles: ProfileChoice,
        revision: str | None = None,
        checkpoint_quantization: str | None = None,
    ) -> EngineConfig:
        """`model_name`: the checkpoint's own name. The first served name, if there is one, replaces it."""
        from prefixwise.engine.prepare import EngineConfig

        name, *others = self._names(model_name)
        return EngineConfig(
            model_name=name,
            delimiter_token_id=self.delimiter_token_id,
            max_items_per_request=self.max_items_per_request,
            plan=self.plan_options(),
            served_names=tuple(others),
            profiles=profiles,
            revision=revision,
            checkpoint_quantization=checkpoint_quantization,
        )

    def _names(self, model_name: str) -> list[str]:
        """All names of the model that requests may use: the served names, its own, the path as given, its base name."""
        path = () if self.model is None else (str(self.model), Path(self.model).name)
        names = (*self.served_names, model_name, *path, Path(model_name).name)
        return list(dict.fromkeys(name for name in names if name))


_LEAST = {
    "prefix_cache_bytes": 1,
    "chunked_prefill_size": NO_BOUND,
    "max_queued_tokens": 1,
    "delimiter_token_id": 0,
    "max_items_per_request": 1,
    "max_loras": 0,
    "max_lora_rank": 1,
}
_EXPECTED = {
    "model": "a folder, a .gguf file, a hub id or None",
    "compilation_cache_dir": "a folder or None",
    "batch_invariant": "True, False or None",
    "prefix_cache": "True or False",
    "weight_cache": "True or False",
    "prefix_cache_bytes": "a whole number of at least 1 byte, or None",
    "chunked_prefill_size": "a whole number of at least 1 token, or -1 or None for no bound",
    "max_queued_tokens": "a whole number of at least 1 token, or None",
    "delimiter_token_id": "a token id of 0 or more, or None",
    "max_items_per_request": "a whole number of at least 1 item",
    "served_names": "a tuple of names, none of them empty",
    "lora": "a tuple of NAME=FOLDER, each name once",
    "max_loras": "a whole number of at least 0 and of at least as many as are loaded at start, or None",
    "max_lora_rank": f"a whole number from 1 to {MAX_RANK}, or None",
    "watchdog_timeout": "a number of seconds of 0 or more",
}


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike | None)


def _is_at_least(value: object, least: int) -> bool:
    """Callers without a type checker may pass strings and floats."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _named(lora: str) -> bool:
    name, _, folder = lora.partition("=")
    return bool(name.strip() and folder)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name.strip() for name in value)


def _check(is_legal: bool, name: str, got: object) -> None:
    if not is_legal:
        message = f"{name} must be {_EXPECTED[name]}, got {got!r}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
