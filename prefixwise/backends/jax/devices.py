"""Which devices, in which dtype, with how much memory for prefixes: every `auto` of the JAX backend is settled here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from prefixwise.backends.jax.mesh import set_jax_option
from prefixwise.contract.errors import BackendError
from prefixwise.forward.tiles import KEY_TILE
from prefixwise.models.cache_folder import user_cache_folder
from prefixwise.models.config import ModelConfig

log = logging.getLogger("prefixwise")

Platform = Literal["cpu", "gpu", "tpu"]
DTYPES = ("float32", "bfloat16", "float16")

_ALIASES = {"cuda": "gpu"}
# The pool, unless told otherwise: of an accelerator's memory a share; of a CPU's, which others use too, this much, or
# more for one whole context. Of contexts so short that this holds many, a few will do.
_POOL_SHARE = 0.2
_MAX_POOL_TOKENS = 1 << 20
_CPU_POOL_BYTES = 256 << 20
_CPU_CONTEXT_BYTES = 1 << 30
_CPU_CONTEXTS = 4
_CACHE_FOLDER = "prefixwise/compiled"


@dataclass(frozen=True)
class DeviceChoice:
    """The devices to build the mesh of, all of one platform."""

    platform: Platform
    devices: tuple[jax.Device, ...]
    memory_bytes: int | None = None  # of one of them; None: it is asked

    @classmethod
    def resolve(cls, device: str) -> DeviceChoice:
        """`auto`: what jax finds; else cpu, gpu, cuda, tpu, or one of them with a number."""
        kind, _, number = device.partition(":")
        if not kind:  # which jax would take for any device
            raise BackendError(f"unknown device {device!r}; expected auto, cpu, gpu, cuda, tpu, or one of many: cuda:1")
        try:
            found = jax.devices() if kind == "auto" else jax.devices(_ALIASES.get(kind, kind))
        except Exception as error:  # jax and its plugins raise what they like
            first_line = str(error).partition("\n")[0]
            raise BackendError(f"device {device!r} was asked for, but jax does not have it: {first_line}") from error
        if number:
            found = _pick(device, number, found)
        return cls(cast(Platform, _ALIASES.get(found[0].platform, found[0].platform)), tuple(found))

    @property
    def kernel_platform(self) -> str:
        """As `attention.api` knows it: the GPU kernels need an NVIDIA GPU of the year 2020 or later (8.0), and some of
        them this one generation, Hopper (9.0)."""
        if self.platform != "gpu":
            return self.platform
        capability = str(getattr(self.devices[0], "compute_capability", ""))
        if not capability.replace(".", "", 1).isdigit() or float(capability) < 8.0:
            return "other gpu"
        return "hopper" if 9.0 <= float(capability) < 10.0 else "gpu"

    def title(self, num_devices: int) -> str:
        kind = self.devices[0].device_kind
        name = self.platform if kind == self.platform else f"{self.platform} ({kind})"
        return name if num_devices == 1 else f"{num_devices} x {name}"


def _pick(device: str, number: str, found: list[jax.Device]) -> list[jax.Device]:
    if not number.isdigit() or int(number) >= len(found):
        raise BackendError(f"device {device!r} was asked for, but there are {len(found)}, counted from 0")
    return [found[int(number)]]


def resolve_dtype(dtype: str, platform: Platform) -> jnp.dtype:
    """`auto`: bfloat16 on accelerators; XLA's products on a CPU are no faster in it."""
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise BackendError(f"unknown dtype {dtype!r}; expected auto, {', '.join(DTYPES)}")
    return jnp.dtype(dtype)


def pool_tokens(config: ModelConfig, token_bytes: int, choice: DeviceChoice, num_bytes: int | None) -> int:
    """How many tokens of prefixes the pool holds: what the bytes allow, if they are given. It is a cache over requests.

    `token_bytes`: of one token's keys and values in all layers, on one device.
    """
    if num_bytes is None:
        return max(KEY_TILE, _default_pool_tokens(config, token_bytes, choice))
    tokens = num_bytes // token_bytes // KEY_TILE * KEY_TILE
    if tokens < KEY_TILE:
        raise BackendError(
            f"prefix_cache_bytes must be at least {KEY_TILE * token_bytes} (one page of {KEY_TILE} tokens), "
            f"got {num_bytes}"
        )
    return tokens


def _default_pool_tokens(config: ModelConfig, token_bytes: int, choice: DeviceChoice) -> int:
    if choice.platform != "cpu":
        return min(_MAX_POOL_TOKENS, _share_of_memory(choice) // token_bytes)
    longest = -(-config.max_context_len // KEY_TILE) * KEY_TILE
    one_context = min(longest, _CPU_CONTEXT_BYTES // token_bytes)
    return min(_CPU_CONTEXTS * longest, max(_CPU_POOL_BYTES // token_bytes, one_context))


def _share_of_memory(choice: DeviceChoice) -> int:
    if choice.memory_bytes is not None:
        return int(_POOL_SHARE * choice.memory_bytes)
    local = [device for device in choice.devices if device.process_index == jax.process_index()]
    stats = (local[0].memory_stats() if local else None) or {}
    return int(_POOL_SHARE * stats.get("bytes_limit", 16 << 30))


def set_compilation_cache(folder: str | None, platform: Platform) -> Path | None:
    """Keep compiled programs on disk: in `folder`, or on accelerators in the user's cache folder.

    Not on a CPU unless asked for: code compiled for one CPU may not run on another that shares the folder. What jax was
    told by others (JAX_COMPILATION_CACHE_DIR) stays, unless a folder is given.
    It holds for the whole process. Returns the folder in use.
    """
    told: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder is None and (platform == "cpu" or told is not None):
        return None if told is None else Path(told)
    path = Path(folder).expanduser() if folder is not None else user_cache_folder() / _CACHE_FOLDER
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if folder is None:
            log.warning("compiled programs are not kept: %s", error)
            return None
        raise BackendError(
            f"the compilation cache must be a folder that can be written, got {folder}: {error}"
        ) from None
    if told != str(path):
        set_jax_option("jax_compilation_cache_dir", str(path))
        set_jax_option("jax_persistent_cache_min_compile_time_secs", 0.0)
        set_jax_option("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()  # it looks at its folder once
    return path
