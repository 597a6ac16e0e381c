"""The transformer in JAX: one forward pass for every attention layout, as one device of the mesh sees it.

Every array here is the device's own part: its heads, its MLP columns, its rows of the vocabulary, its share of the
batch. Sums over the `tensor` axis are the only words between devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.attention.api import extend_attention, packed_attention
from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.dense import DenseMask
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.backends.jax.inputs import ForwardInputs, ProgramSpec
from prefixwise.backends.jax.kv_cache import KVCacheArrays
from prefixwise.backends.jax.mesh import TENSOR
from prefixwise.backends.jax.qk_norm_rope import (
    HeadNorms,
    Kept,
    RopeTable,
    qk_norm_rope_and_cache,
    rms_norm,
    turn,
)
from prefixwise.backends.jax.row_blocks import RowBlocks, as_bits
from prefixwise.backends.jax.weights import LayerWeights, ModelWeights
from prefixwise.forward.kv_pages import NOT_CACHED
from prefixwise.models.config import Activation, ModelConfig

Inputs = ForwardInputs[jax.Array]

_UNBOUNDED = XlaAttention()


class LastLayer(NamedTuple):
    """What is left of a trunk: the last layer's input [T, D], and what its attention gave [T, N H]."""

    x: jax.Array
    attended: jax.Array


@dataclass(frozen=True)
class Transformer:
    """Sizes and choices that are fixed when a program is compiled."""

    config: ModelConfig
    kv_heads: int  # of this device
    heads_per_kv: int
    tp_size: int
    rows: RowBlocks
    attention: AttentionImplementation  # where prefixes are read in the pool
    row_attention: AttentionImplementation  # where they are read in the batch
    fuses_heads: bool  # norms, rotation and the write to the pool as one kernel?

    def __call__(
        self, spec: ProgramSpec, weights: ModelWeights, pool: KVCacheArrays, inputs: Inputs, mask: jax.Array | None
    ) -> tuple[LastLayer, KVCacheArrays]:
        """All up to the last layer's attention, and the pool."""
        x = self._embed(weights, inputs.token_ids)
        rotation = self._rotation(inputs.positions)
        last = self.config.num_layers - 1

        def attend(layer: Any, x: jax.Array, pool: KVCacheArrays) -> tuple[jax.Array, KVCacheArrays]:
            base = jnp.asarray(layer * (len(pool.keys) // self.config.num_layers), jnp.int32)
            kept = Kept(pool, inputs.cache_slots, base) if spec.keeps else None
            heads, filled = self._project(weights.layers, layer, x, rotation, inputs, kept)
            pool = filled or pool  # first: segments read what others keep here
            source = Source(pool.keys, pool.values, base) if spec.reads == "pool" else None
            return self._attend(self.attention_for(spec), heads, source, inputs, mask), pool

        def body(
            carry: tuple[jax.Array, KVCacheArrays], layer: jax.Array
        ) -> tuple[tuple[jax.Array, KVCacheArrays], None]:
            x, pool = carry
            attended, pool = attend(layer, x, pool)
            finish = partial(self._finish, _at(weights.layers, layer))
            return (self.rows.over_tokens(finish, inputs.num_token_blocks[0], x, attended), pool), None

        (x, pool), _ = lax.scan(body, (x, pool), jnp.arange(last))
        attended, pool = attend(last, x, pool)
        return LastLayer(x, attended), pool

    def _embed(self, weights: ModelWeights, token_ids: jax.Array) -> jax.Array:
        x = look_up(weights.embedding, token_ids, self.tp_size)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)  # rounded to it, as transformers does

    def _rotation(self, positions: jax.Array) -> RopeTable:
        frequencies = jnp.asarray(self.config.rope.inverse_frequencies(self.config.head_size))
        angles = positions.astype(jnp.float32)[:, None, None] * frequencies
        return RopeTable(jnp.cos(angles), jnp.sin(angles))

    def _project(
        self, layers: LayerWeights, layer: Any, x: jax.Array, rotation: RopeTable, inputs: Inputs, kept: Kept | None
    ) -> tuple[Heads, KVCacheArrays | None]:
        """Norm, Q K V, their norms and rotation; and the pool, where something is kept."""
        weights, eps, num_kv_heads = _at(layers, layer), self.config.norm_eps, self.kv_heads

        def project(block: jax.Array) -> jax.Array:
            normed = rms_norm(block, weights.attention_norm, eps)
            return linear(normed, weights.qkv, bias=weights.qkv_bias).reshape(len(block), -1, self.config.head_size)

        def project_and_rope(block: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
            norms = weights.q_norm, weights.k_norm
            return turn(project(block), num_kv_heads, norms, eps, RopeTable(cos, sin))

        num_blocks = inputs.num_token_blocks[0]
        if self.fuses_heads:
            qkv = self.rows.over_tokens(project, num_blocks, x)
            norms, number = HeadNorms(layers.q_norm, layers.k_norm), jnp.asarray(layer, jnp.int32)
            qkv, pool = qk_norm_rope_and_cache(qkv, num_kv_heads, norms, number, eps, rotation, kept)
            return Heads(qkv, num_kv_heads), pool
        heads = Heads(self.rows.over_tokens(project_and_rope, num_blocks, x, *rotation), num_kv_heads)
        return heads, None if kept is None else _keep(kept, heads)

    def attention_for(self, spec: ProgramSpec) -> AttentionImplementation:
        """What computes a program's attention, unless its mask is dense. XLA's takes any number of tokens."""
        chosen = self.attention if spec.reads == "pool" else self.row_attention
        return chosen if chosen.max_tokens is None or spec.num_tokens <= chosen.max_tokens else _UNBOUNDED

    def _attend(
        self,
        attention: AttentionImplementation,
        heads: Heads,
        pool: Source | None,
        inputs: Inputs,
        mask: jax.Array | None,
    ) -> jax.Array:
        """[T, N H]. `pool`: where prefixes are read; None: in the batch."""
        if pool is not None:
            out = extend_attention(heads, pool, inputs.tiles, attention)
        else:
            dense = None
            if mask is not None:
                dense = DenseMask(mask, inputs.token_row, inputs.row_starts, inputs.num_rows[0])
            out = packed_attention(heads, inputs.tiles, attention, dense)
        return out.reshape(len(out), -1)

    def _finish(self, layer: LayerWeights, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Output projection, residual, MLP, residual."""
        x = x + self._sum_over_shards(attended, layer.o)
        gate_up = linear(rms_norm(x, layer.mlp_norm, self.config.norm_eps), layer.gate_up)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        activated = activate(gate, self.config.activation) * up
        return x + self._sum_over_shards(activated, layer.down)

    def _sum_over_shards(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """A product whose columns are split: rounded once, after the sum."""
        if self.tp_size == 1:
            return linear(x, weight)
        return lax.psum(linear(x, weight, jnp.float32), TENSOR).astype(x.dtype)

    def score(self, weights: ModelWeights, last: LastLayer, tokens: jax.Array) -> jax.Array:
        """Hidden states of some tokens after the final norm, [S, D] float32: the last layer's rest is for the tokens
        that are scored, and for no others."""
        layer = _at(weights.layers, self.config.num_layers - 1)
        hidden = self._finish(layer, last.x[tokens], last.attended[tokens])
        return rms_norm(hidden, weights.final_norm, self.config.norm_eps).astype(jnp.float32)


def _at(layers: LayerWeights, layer: Any) -> LayerWeights:
    """One layer of the stacked weights."""
    return jax.tree.map(lambda stacked: stacked[layer], layers)


def _keep(kept: Kept, heads: Heads) -> KVCacheArrays:
    """Write the tokens that are kept to their places in the pool's layer; the others' writes fall off its end."""
    pool = kept.pool
    place = jnp.where(kept.slots == NOT_CACHED, len(pool.keys), kept.base + kept.slots)

    def write(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[place].set(as_bits(new) if stored.dtype == jnp.uint16 else new, mode="drop")

    return KVCacheArrays(write(pool.keys, heads.k), write(pool.values, heads.v))


def look_up(table: jax.Array, ids: jax.Array, tp_size: int) -> jax.Array:
    """Rows of a table [V, D] whose rows are split over the shards."""
    if tp_size == 1:
        return table[ids]
    local = ids - lax.axis_index(TENSOR) * len(table)
    is_here = (local >= 0) & (local < len(table))
    rows = jnp.where(is_here[:, None], table[jnp.clip(local, 0, len(table) - 1)], 0)
    return lax.psum(rows, TENSOR)


def linear(x: jax.Array, weight: jax.Array, dtype: Any = None, *, bias: jax.Array | None = None) -> jax.Array:
    """x [T, in] with a weight [out, in] to [T, out], in x's dtype unless another is given."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = jnp.float32 if bias is not None else dtype
    out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=wide)
    if bias is None:
        return out
    return (out + bias.astype(jnp.float32)).astype(dtype or x.dtype)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """In float32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    return (jax.nn.silu(wide) if activation == "silu" else jax.nn.gelu(wide, approximate=True)).astype(x.dtype)
