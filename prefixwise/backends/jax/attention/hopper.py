"""Attention on NVIDIA's Hopper GPUs (H100, H200) in half precision: a kernel for each part.

Self-attention is a Triton kernel (`gpu_self_attention.py`). Prefix attention, which is nearly all of the work, is a
Mosaic GPU kernel for Hopper's TMA copies and WGMMA (`hopper_prefix.py`). That module is imported where it is used: it
needs absl-py, which jax does not install.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Scoring, Source
from prefixwise.backends.jax.attention.gpu_self_attention import self_attention, self_tile_tokens
from prefixwise.forward.tiles import DeviceTiles, TileSizes

_HEAD_SIZES = (64, 128)  # 256 does not fit shared memory
_INTERPRETED_CTAS = 2


class HopperAttention(AttentionImplementation):
    """See the module. `interpret` (parameters of Pallas) interprets the kernels on any device, for tests."""

    name = "hopper"
    needs_padding_tiles = True
    reads_batches = False  # copies begin at multiples of eight tokens, as pages do

    def __init__(self, *, interpret: Any = None) -> None:
        self._interpret = interpret

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        if platform != "hopper" and self._interpret is None:
            return f"it needs an NVIDIA GPU of compute capability 9, and this is: {platform}"
        if find_spec("absl") is None:
            return "jax's GPU kernels need absl-py, which is not installed (pip install absl-py)"
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, and this is {dtype}"
        if head_size not in _HEAD_SIZES:
            return f"it takes head sizes of {' and '.join(map(str, _HEAD_SIZES))}, and this is {head_size}"
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        from prefixwise.backends.jax.attention.hopper_units import ALIGNMENT, tile_tokens

        tokens, prefix = self_tile_tokens(heads_per_kv), tile_tokens(heads_per_kv)
        return TileSizes(tokens, tokens, prefix, ALIGNMENT, has_token_arrays=False)

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
        assert scoring.is_plain, "this implementation has no sliding windows and no capped scores"
        from prefixwise.backends.jax.attention.hopper_prefix import NUM_CTAS, prefix_attention
        from prefixwise.backends.jax.attention.hopper_units import Inputs, Shape

        assert source is not None, "this implementation reads pages of the KV cache only"
        sizes = self.tile_sizes(heads.heads_per_kv)
        self_part = self_attention(heads, tiles, sizes, interpret=self._interpret is not None)
        inputs = Inputs(
            counts=tiles.counts,
            starts=tiles.prefix_start,
            lens=tiles.prefix_len,
            reads=tiles.prefix_read,
            lists=tiles.prefix_list,
            addresses=tiles.key_tile_addresses,
            base=source.base.reshape(1),
            q=heads.qkv,
            k=source.keys,
            v=source.values,
            self_out=self_part.out,
            self_lse=self_part.lse,
        )
        shape = Shape(
            num_heads=heads.num_heads,
            heads_per_kv=heads.heads_per_kv,
            head_size=heads.qkv.shape[-1],
            first_key=source.first_key,
            first_value=source.first_value,
            num_ctas=NUM_CTAS if self._interpret is None else _INTERPRETED_CTAS,
            is_interpreted=self._interpret is not None,
        )
        return prefix_attention(inputs, shape, self._interpret)
