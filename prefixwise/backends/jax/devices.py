"""Devices, dtype and size of the KV cache: every `auto` of the JAX backend is resolved here."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from prefixwise.backends.jax.mesh import set_jax_option
from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.host import user_cache_folder
from prefixwise.models.config import ModelConfig

log = logging.getLogger("prefixwise")

Platform = Literal["cpu", "gpu", "tpu"]
DTYPES = ("float32", "bfloat16", "float16")

_ALIASES = {"cuda": "gpu"}
# The default size of the KV cache: a share of an accelerator's memory. On a CPU, whose memory other processes use too,
# these bytes, more where one whole context needs more, and at most a few contexts.
_KV_CACHE_SHARE = 0.2
_MAX_KV_CACHE_TOKENS = 1 << 20
_CPU_KV_CACHE_BYTES = 256 << 20
_CPU_CONTEXT_BYTES = 1 << 30
_CPU_CONTEXTS = 4
_CACHE_FOLDER = "prefixwise/compiled"


@dataclass(frozen=True)
class DeviceChoice:
    """The devices of the mesh, all of one platform."""

    platform: Platform
    devices: tuple[jax.Device, ...]
    memory_bytes: int | None = None  # of one device; None: ask the device

    @classmethod
    def resolve(cls, device: str) -> DeviceChoice:
        """`auto`: the devices that jax finds; else cpu, gpu, cuda, tpu, or one of these with a number."""
        kind, _, number = device.partition(":")
        if not kind:  # jax would read it as any device
            raise BackendError(f"unknown device {device!r}; expected auto, cpu, gpu, cuda, tpu, or one of many: cuda:1")
        try:
            found = jax.devices() if kind == "auto" else jax.devices(_ALIASES.get(kind, kind))
        except Exception as error:  # jax and its plugins raise errors of many types
            first_line = str(error).partition("\n")[0]
            raise BackendError(f"device {device!r} was asked for, but jax does not have it: {first_line}") from error
        if number:
            found = _pick(device, number, found)
        return cls(cast(Platform, _ALIASES.get(found[0].platform, found[0].platform)), tuple(found))

    @property
    def kernel_platform(self) -> str:
        """The platform as `attention.api` knows it: the GPU kernels need an NVIDIA GPU of compute capability 8.0 or
        later, and some of them Hopper (9.0)."""
        if self.platform != "gpu":
            return self.platform
        capability = self.capability
        if capability is None or capability < (8, 0):
            return "other gpu"
        return "hopper" if capability[0] == 9 else "gpu"

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of NVIDIA GPUs; None: others."""
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(self.devices[0], "compute_capability", "")))
        return None if self.platform != "gpu" or found is None else (int(found[1]), int(found[2]))

    def title(self, num_devices: int) -> str:
        kind = self.devices[0].device_kind
        name = self.platform if kind == self.platform else f"{self.platform} ({kind})"
        return name if num_devices == 1 else f"{num_devices} x {name}"


def _pick(device: str, number: str, found: list[jax.Device]) -> list[jax.Device]:
    if not number.isdigit() or int(number) >= len(found):
        raise BackendError(f"device {device!r} was asked for, but there are {len(found)}, counted from 0")
    return [found[int(number)]]


def resolve_dtype(dtype: str, platform: Platform) -> jnp.dtype:
    """`auto`: bfloat16 on accelerators; XLA's GEMMs on a CPU are no faster in it."""
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise BackendError(f"unknown dtype {dtype!r}; expected auto, {', '.join(DTYPES)}")
    return jnp.dtype(dtype)


def kv_cache_tokens(config: ModelConfig, token_bytes: int, choice: DeviceChoice, num_bytes: int | None) -> int:
    """How many tokens of prefixes the KV cache holds: as many as `num_bytes` allow, or a default.

    `token_bytes`: one token's keys and values in all layers, on one device.
    """
    if num_bytes is None:
        return max(KV_BLOCK_SIZE, _default_kv_cache_tokens(config, token_bytes, choice))
    tokens = num_bytes // token_bytes // KV_BLOCK_SIZE * KV_BLOCK_SIZE
    if tokens < KV_BLOCK_SIZE:
        raise BackendError(
            f"prefix_cache_bytes must be at least {KV_BLOCK_SIZE * token_bytes} (one page of {KV_BLOCK_SIZE} tokens), "
            f"got {num_bytes}"
        )
    return tokens


def _default_kv_cache_tokens(config: ModelConfig, token_bytes: int, choice: DeviceChoice) -> int:
    if choice.platform != "cpu":
        return min(_MAX_KV_CACHE_TOKENS, _share_of_memory(choice) // token_bytes)
    longest = -(-config.max_context_len // KV_BLOCK_SIZE) * KV_BLOCK_SIZE
    one_context = min(longest, _CPU_CONTEXT_BYTES // token_bytes)
    return min(_CPU_CONTEXTS * longest, max(_CPU_KV_CACHE_BYTES // token_bytes, one_context))


def _share_of_memory(choice: DeviceChoice) -> int:
    if choice.memory_bytes is not None:
        return int(_KV_CACHE_SHARE * choice.memory_bytes)
    local = [device for device in choice.devices if device.process_index == jax.process_index()]
    stats = (local[0].memory_stats() if local else None) or {}
    return int(_KV_CACHE_SHARE * stats.get("bytes_limit", 16 << 30))


def set_compilation_cache(folder: str | None, platform: Platform) -> Path | None:
    """Store compiled programs on disk: in `folder`, or on accelerators in the user's cache folder.

    Not on a CPU by default: code compiled for one CPU may not run on another that shares the folder. A folder that is
    set in jax already (JAX_COMPILATION_CACHE_DIR) stays, unless `folder` is given. Holds for the whole process. Returns
    the folder in use.
    """
    current: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder is None and (platform == "cpu" or current is not None):
        return None if current is None else Path(current)
    path = Path(folder).expanduser() if folder is not None else user_cache_folder() / _CACHE_FOLDER
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if folder is None:
            log.warning("compiled programs are not cached on disk: %s", error)
            return None
        raise BackendError(
            f"the compilation cache must be a folder that can be written, got {folder}: {error}"
        ) from None
    if current != str(path):
        set_jax_option("jax_compilation_cache_dir", str(path))
        set_jax_option("jax_persistent_cache_min_compile_time_secs", 0.0)
        set_jax_option("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()  # it reads the option only once
    return path
