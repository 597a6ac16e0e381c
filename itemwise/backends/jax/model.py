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

from itemwise.backends.jax.attention.api import extend_attention, packed_attention
from itemwise.backends.jax.attention.base import AttentionImplementation, Source
from itemwise.backends.jax.attention.dense import DenseMask
from itemwise.backends.jax.inputs import NOT_KEPT, ForwardInputs, ProgramSpec
from itemwise.backends.jax.mesh import TENSOR
from itemwise.backends.jax.pool import PoolArrays
from itemwise.backends.jax.row_blocks import RowBlocks, as_bits, map_rows
from itemwise.backends.jax.weights import LayerWeights, ModelWeights
from itemwise.models.config import Activation, ModelConfig

Inputs = ForwardInputs[jax.Array]


class QKV(NamedTuple):
    """Queries [T, N, H], keys and values [T, K, H]; queries and keys are rotated."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Rotation(NamedTuple):
    """Cosines and sines of each token's position, [T, 1, H / 2], float32."""

    cos: jax.Array
    sin: jax.Array


@dataclass(frozen=True)
class Transformer:
    """Sizes and choices that are fixed when a program is compiled."""

    config: ModelConfig
    kv_heads: int  # of this device
    heads_per_kv: int
    tp_size: int
    rows: RowBlocks
    attention: AttentionImplementation

    def __call__(
        self, spec: ProgramSpec, weights: ModelWeights, pool: PoolArrays, inputs: Inputs, mask: jax.Array | None
    ) -> tuple[jax.Array | None, PoolArrays]:
        """Hidden states of the scored tokens after the final norm, [T, D] float32, and the pool."""
        x = self._embed(weights, inputs.token_ids)
        rotation = self._rotation(inputs.positions)
        last = self.config.num_layers - 1

        def keep(pool: PoolArrays, layer: Any, qkv: QKV) -> PoolArrays:
            return _keep(pool, self.config.num_layers, layer, qkv, inputs.keep_slots)

        def attend(layer: Any, x: jax.Array, pool: PoolArrays) -> tuple[jax.Array, PoolArrays]:
            qkv = self._project(_at(weights.layers, layer), x, rotation, inputs)
            pool = keep(pool, layer, qkv) if spec.keeps else pool  # first: segments read what others keep here
            return self._attend(spec, layer, qkv, pool, inputs, mask), pool

        def body(carry: tuple[jax.Array, PoolArrays], layer: jax.Array) -> tuple[tuple[jax.Array, PoolArrays], None]:
            x, pool = carry
            attended, pool = attend(layer, x, pool)
            finish = partial(self._finish, _at(weights.layers, layer))
            return (self.rows.over_tokens(finish, inputs.num_token_blocks[0], x, attended), pool), None

        (x, pool), _ = lax.scan(body, (x, pool), jnp.arange(last))
        if not spec.scores:  # a prefill: the last layer's keys and values are all that is missing
            return None, keep(pool, last, self._project(_at(weights.layers, last), x, rotation, inputs))
        attended, pool = attend(last, x, pool)
        return self._score(weights, x, attended, inputs), pool

    def _embed(self, weights: ModelWeights, token_ids: jax.Array) -> jax.Array:
        x = look_up(weights.embedding, token_ids, self.tp_size)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)  # rounded to it, as transformers does

    def _rotation(self, positions: jax.Array) -> Rotation:
        frequencies = jnp.asarray(self.config.rope.inverse_frequencies(self.config.head_size))
        angles = positions.astype(jnp.float32)[:, None, None] * frequencies
        return Rotation(jnp.cos(angles), jnp.sin(angles))

    def _project(self, layer: LayerWeights, x: jax.Array, rotation: Rotation, inputs: Inputs) -> QKV:
        """Norm, Q K V, their norms and rotation."""
        head_size, eps = self.config.head_size, self.config.norm_eps
        num_heads = self.kv_heads * self.heads_per_kv

        def project(block: jax.Array, cos: jax.Array, sin: jax.Array) -> QKV:
            normed = rms_norm(block, layer.attention_norm, eps)
            qkv = linear(normed, layer.qkv, bias=layer.qkv_bias).reshape(len(block), -1, head_size)
            q, k, v = jnp.split(qkv, [num_heads, num_heads + self.kv_heads], axis=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
            return QKV(rotate(q, cos, sin), rotate(k, cos, sin), v)

        return self.rows.over_tokens(project, inputs.num_token_blocks[0], x, *rotation)

    def _attend(
        self,
        spec: ProgramSpec,
        layer: Any,
        qkv: QKV,
        pool: PoolArrays,
        inputs: Inputs,
        mask: jax.Array | None,
    ) -> jax.Array:
        """[T, N H]."""
        if spec.reads == "pool":
            base = jnp.asarray(layer * (len(pool.keys) // self.config.num_layers), jnp.int32)
            source = Source(pool.keys, pool.values, base)
            out = extend_attention(qkv.q, qkv.k, qkv.v, source, inputs.tiles, self.attention)
        else:
            dense = None
            if mask is not None:
                dense = DenseMask(mask, inputs.token_row, inputs.row_starts, inputs.num_rows[0])
            out = packed_attention(qkv.q, qkv.k, qkv.v, inputs.tiles, self.attention, dense)
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

    def _score(self, weights: ModelWeights, x: jax.Array, attended: jax.Array, inputs: Inputs) -> jax.Array:
        """The last layer's rest for the tokens that are scored, and for no others."""
        layer = _at(weights.layers, self.config.num_layers - 1)

        def finish(tokens: jax.Array) -> jax.Array:
            last = self._finish(layer, x[tokens], attended[tokens])
            return rms_norm(last, weights.final_norm, self.config.norm_eps).astype(jnp.float32)

        score_tokens = inputs.score_tokens
        num_blocks = inputs.num_score_blocks[0]
        hidden: jax.Array = map_rows(finish, self.rows.score_rows, num_blocks, len(score_tokens), (score_tokens,))
        return hidden


def _at(layers: LayerWeights, layer: Any) -> LayerWeights:
    """One layer of the stacked weights."""
    return jax.tree.map(lambda stacked: stacked[layer], layers)


def _keep(pool: PoolArrays, num_layers: int, layer: Any, qkv: QKV, slots: jax.Array) -> PoolArrays:
    """Write the tokens that are kept to their places in the pool's layer; the others' writes fall off its end."""
    size = len(pool.keys)
    place = jnp.where(slots == NOT_KEPT, size, layer * (size // num_layers) + slots)

    def write(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[place].set(as_bits(new) if stored.dtype == jnp.uint16 else new, mode="drop")

    return PoolArrays(write(pool.keys, qkv.k), write(pool.values, qkv.v))


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


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """In float32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    return (jax.nn.silu(wide) if activation == "silu" else jax.nn.gelu(wide, approximate=True)).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of [T, heads, H]: the first half of each head pairs with the second half."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
