"""The door to attention: one function per place of the prefixes, and the choice of the implementation behind it.

A caller chooses first (`choose_implementation`), because the batch is cut into the tiles that the choice wants; then
every layer calls the function for where its prefixes are. `implementation=None` always finds one that works; a named
one that cannot run here says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise

import jax
import jax.numpy as jnp

from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.dense import DenseMask, dense_attention
from prefixwise.contract.errors import BackendError
from prefixwise.forward.tiles import DeviceTiles

# Best first; each is imported when it is looked at.
_CLASSES = {
    "hopper": "HopperAttention",
    "pallas_gpu": "PallasGpuAttention",
    "pallas_tpu": "PallasTpuAttention",
    "xla": "XlaAttention",
    "reference": "ReferenceAttention",
}
IMPLEMENTATIONS = tuple(_CLASSES)
YOUNG = ("hopper", "pallas_tpu")  # to be tried before they are used

log = logging.getLogger("prefixwise")


def choose_implementation(
    name: str | None = None, *, platform: str, dtype: jnp.dtype, head_size: int
) -> AttentionImplementation:
    """The named implementation, or with None the best that runs on this platform (cpu, gpu, hopper, tpu)."""
    if name is not None:
        found = _load(name)
        reason = found.why_not(platform, dtype, head_size)
        if reason is not None:
            raise BackendError(f"attention {name!r} cannot run here: {reason}")
        return found
    candidates = (_load(each) for each in IMPLEMENTATIONS)
    return next(each for each in candidates if each.why_not(platform, dtype, head_size) is None)


def choose_working(
    *, platform: str, dtype: jnp.dtype, head_size: int, probe_attention: Callable[[AttentionImplementation], None]
) -> AttentionImplementation:
    """The best that runs here, and does so when it is tried: jax's kernels for one generation of GPUs are young, and
    so is ours for TPUs; another version of jax may not compile what this one does. The last candidate is not tried."""
    candidates = [each for each in map(_load, IMPLEMENTATIONS) if each.why_not(platform, dtype, head_size) is None]
    for candidate, following in pairwise(candidates):
        if candidate.name not in YOUNG:
            return candidate
        try:
            probe_attention(candidate)
            return candidate
        except Exception as error:  # whatever jax and its compilers raise
            first_line = str(error).partition("\n")[0]
            log.warning("attention %r does not work here, %r is used: %s", candidate.name, following.name, first_line)
    return candidates[-1]


def choose_for_rows(
    chosen: AttentionImplementation, *, platform: str, dtype: jnp.dtype, head_size: int
) -> AttentionImplementation:
    """What serves rows that hold their own prefixes: the chosen one if it can, else the best that does."""
    if chosen.reads_batches:
        return chosen
    candidates = (_load(each) for each in IMPLEMENTATIONS)
    return next(each for each in candidates if each.reads_batches and each.why_not(platform, dtype, head_size) is None)


def _load(name: str) -> AttentionImplementation:
    if name not in _CLASSES:
        raise BackendError(f"unknown attention {name!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    module = import_module(f"prefixwise.backends.jax.attention.{name}")
    implementation: AttentionImplementation = getattr(module, _CLASSES[name])()
    return implementation


Implementation = AttentionImplementation | str | None


def _resolve(implementation: Implementation, qkv: jax.Array) -> AttentionImplementation:
    if isinstance(implementation, AttentionImplementation):
        return implementation
    return choose_implementation(
        implementation, platform=jax.default_backend(), dtype=qkv.dtype, head_size=qkv.shape[-1]
    )


def packed_attention(
    heads: Heads, tiles: DeviceTiles, implementation: Implementation = None, dense: DenseMask | None = None
) -> jax.Array:
    """Rows of a prefix and one item (serial) or many: each item sees the row's prefix and itself. To [T, N, H].

    With `dense` the mask is an array, which XLA alone reads, whatever the implementation.
    """
    if dense is not None:
        return dense_attention(heads, tiles, dense)
    return _resolve(implementation, heads.qkv).attend(heads, None, tiles)


def extend_attention(
    heads: Heads, pool: Source, tiles: DeviceTiles, implementation: Implementation = None
) -> jax.Array:
    """Items, or blocks of prefixes: each sees its prefix, whose keys and values are in the pool, and itself.

    What a forward keeps must be in the pool before it is read here. To [T, N, H].
    """
    return _resolve(implementation, heads.qkv).attend(heads, pool, tiles)
