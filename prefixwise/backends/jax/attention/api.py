"""The interface to attention: one function for prefixes in the batch, one for prefixes in the KV cache, and the choice
of the implementation.

A caller chooses first (`choose_implementation`), because the batch is cut into the tiles of the chosen implementation.
Then every layer calls `packed_attention` or `extend_attention`. Without a name the best implementation for the platform
is chosen; a named one that cannot run here raises the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Scoring, Source
from prefixwise.backends.jax.attention.dense import DenseMask, dense_attention
from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import ForwardBatch, Layout, Prefix
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, Tiles, cut_tiles, tile_capacities

# Best first; each is imported when it is considered.
_CLASSES = {
    "hopper": "HopperAttention",
    "pallas_gpu": "PallasGpuAttention",
    "pallas_tpu": "PallasTpuAttention",
    "xla": "XlaAttention",
    "reference": "ReferenceAttention",
}
IMPLEMENTATIONS = tuple(_CLASSES)
EXPERIMENTAL = ("hopper", "pallas_tpu")  # probed before they are used
_PROBE_TOKENS = 64  # one item of so many tokens, over a prefix of two key tiles, the second with one token

log = logging.getLogger("prefixwise")


def choose_implementation(
    name: str | None = None,
    *,
    platform: str,
    dtype: jnp.dtype,
    head_size: int,
    is_plain: bool = True,
    is_causal: bool = True,
) -> AttentionImplementation:
    """The named implementation, or with None the best that runs on this platform (cpu, gpu, hopper, tpu).

    `is_plain`: has no layer of the model another causal `Scoring` than PLAIN?
    """
    if name is not None:
        found = _load(name)
        reason = _why_not(found, platform, dtype, head_size, is_plain, is_causal)
        if reason is not None:
            raise BackendError(f"attention {name!r} cannot run here: {reason}")
        return found
    candidates = (_load(each) for each in IMPLEMENTATIONS)
    return next(each for each in candidates if _why_not(each, platform, dtype, head_size, is_plain, is_causal) is None)


def choose_working(
    *,
    platform: str,
    dtype: jnp.dtype,
    head_size: int,
    is_plain: bool = True,
    is_causal: bool = True,
    probe: Callable[[AttentionImplementation], None],
) -> AttentionImplementation:
    """The best implementation that runs here and passes its probe.

    jax's Hopper kernels and our TPU kernel are experimental, and another version of jax may not compile them. The last
    candidate is not probed.
    """
    found = map(_load, IMPLEMENTATIONS)
    candidates = [each for each in found if _why_not(each, platform, dtype, head_size, is_plain, is_causal) is None]
    for candidate, following in pairwise(candidates):
        if candidate.name not in EXPERIMENTAL:
            return candidate
        try:
            probe(candidate)
            return candidate
        except Exception as error:  # jax and its compilers raise errors of many types
            first_line = str(error).partition("\n")[0]
            log.warning("attention %r does not work here, %r is used: %s", candidate.name, following.name, first_line)
    return candidates[-1]


def choose_for_batch_prefixes(
    chosen: AttentionImplementation,
    *,
    platform: str,
    dtype: jnp.dtype,
    head_size: int,
    is_plain: bool = True,
    is_causal: bool = True,
) -> AttentionImplementation:
    """The implementation for sequences that hold their own prefixes: the chosen one, or the best that can."""
    if chosen.reads_batches:
        return chosen
    candidates = (each for each in map(_load, IMPLEMENTATIONS) if each.reads_batches)
    return next(each for each in candidates if _why_not(each, platform, dtype, head_size, is_plain, is_causal) is None)


def _why_not(
    implementation: AttentionImplementation,
    platform: str,
    dtype: jnp.dtype,
    head_size: int,
    is_plain: bool,
    is_causal: bool,
) -> str | None:
    if not is_causal and not implementation.takes_bidirectional:
        return "it has no bidirectional attention, which this model needs"
    if not is_plain and not implementation.takes_scorings:
        return "it has no sliding windows and no capped or differently scaled scores, which this model needs"
    return implementation.why_not(platform, dtype, head_size)


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
    heads: Heads,
    tiles: DeviceTiles,
    implementation: Implementation = None,
    dense: DenseMask | None = None,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """Sequences of a prefix and one item (serial) or many: each item sees the sequence's prefix and itself.

    To [T, N, H]. With `dense` the mask is an array, which only XLA reads, so `implementation` is ignored.
    """
    if dense is not None:
        return dense_attention(heads, tiles, dense, scoring)
    return _resolve(implementation, heads.qkv).attend(heads, None, tiles, scoring)


def extend_attention(
    heads: Heads,
    kv_cache: Source,
    tiles: DeviceTiles,
    implementation: Implementation = None,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """Items, or blocks of prefixes: each sees its prefix, whose keys and values are in the KV cache, and itself.

    Segments that this forward caches must be in the KV cache before the call. To [T, N, H].
    """
    return _resolve(implementation, heads.qkv).attend(heads, kv_cache, tiles, scoring)


def probe_attention(implementation: AttentionImplementation, heads: tuple[int, int, int], dtype: jnp.dtype) -> None:
    """Compile and run one small extend attention. `heads`: KV heads, query heads for each of them, and their size.

    Raises what the compiler raises, and ArithmeticError where the mean of equal values is another value.
    """
    num_kv_heads, heads_per_kv, head_size = heads
    ones = jnp.ones((_PROBE_TOKENS, (heads_per_kv + 2) * num_kv_heads, head_size), dtype)
    pages = jnp.ones((2 * KEY_TILE, num_kv_heads, head_size), dtype)
    sizes = implementation.tile_sizes(heads_per_kv)
    arrays, lens = cut_tiles(_probe_batch(), sizes, [np.array([KEY_TILE, 0])]), tile_capacities(_PROBE_TOKENS, sizes, 2)
    padded = (np.pad(array, (0, size - len(array))) for array, size in zip(arrays, lens, strict=True))
    tiles = Tiles(*map(jnp.asarray, padded))
    attend = jax.jit(extend_attention, static_argnames="implementation")
    source = Source(pages, pages, jnp.int32(0))
    out = np.asarray(attend(Heads(ones, num_kv_heads), source, tiles, implementation=implementation), np.float32)
    if not np.allclose(out, 1.0, atol=0.02):
        raise ArithmeticError(f"attention over equal values of 1 gave {out.min()} to {out.max()}")


def _probe_batch() -> ForwardBatch:
    tokens = np.zeros(_PROBE_TOKENS, np.int32)
    edges = np.array([0, _PROBE_TOKENS])
    return ForwardBatch(
        layout=Layout.EXTEND,
        token_ids=tokens,
        positions=tokens,
        segment_starts=edges,
        prefix_index=np.zeros(1, np.int64),
        prefix_lens=np.array([KEY_TILE + 1]),
        prefixes=(Prefix(),),
        sequence_starts=edges,
        score_tokens=np.zeros(0, np.int64),
        label_ids=np.zeros((0, 0), np.int32),
    )
