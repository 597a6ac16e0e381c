"""The transformer in JAX: one forward pass for every attention layout, as one device of the mesh sees it.

Every array here is the device's own part: its heads, its MLP columns, its rows of the vocabulary, its share of the
batch. Devices communicate only by sums over the `tensor` axis. The head is in `head_gemms.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.attention.api import extend_attention, packed_attention
from prefixwise.backends.jax.attention.base import NO_WINDOW, AttentionImplementation, Heads, Scoring, Source
from prefixwise.backends.jax.attention.dense import DenseMask
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.backends.jax.experts import Routing, Slots, add_outputs, assign_slots, expert_matrix, route
from prefixwise.backends.jax.inputs import ForwardInputs, ProgramSpec
from prefixwise.backends.jax.kv_cache import KVCacheArrays
from prefixwise.backends.jax.linear import activate, layer_linear, linear
from prefixwise.backends.jax.lora import Adapters, AddLora, LoraRows, adding, no_lora
from prefixwise.backends.jax.mesh import TENSOR
from prefixwise.backends.jax.pooling import mean_of_segments
from prefixwise.backends.jax.qk_norm_rope import (
    CacheWrite,
    HeadNorms,
    RopeTable,
    qk_norm_rope,
    qk_norm_rope_and_cache,
    rms_norm,
    write_cache,
)
from prefixwise.backends.jax.row_tiles import RowTiles, map_rows
from prefixwise.backends.jax.weights import LayerWeights, ModelWeights
from prefixwise.models.config import ModelConfig, RopeConfig
from prefixwise.models.lora import Matrix

Inputs = ForwardInputs[jax.Array]
Layers = tuple[jax.Array, jax.Array, KVCacheArrays]  # between layers: x, output of the last attention, KV cache
Attend = Callable[[Any, jax.Array, KVCacheArrays], tuple[jax.Array, KVCacheArrays]]  # layer, x, KV cache
Finish = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]  # layer, x, output of attention, number of tiles

_UNBOUNDED = XlaAttention()


class LastLayer(NamedTuple):
    """The output of a trunk: the last layer's input [T, D], and the output of its attention [T, N H]. Where the mean of
    a segment is scored, the first is the output of the whole model in float32."""

    x: jax.Array
    attended: jax.Array


@dataclass(frozen=True)
class Transformer:
    """Sizes and choices that are fixed when a program is compiled."""

    config: ModelConfig
    kv_heads: int  # of this device
    heads_per_kv: int
    tp_size: int
    rows: RowTiles
    attention: AttentionImplementation  # reads prefixes in the KV cache
    batch_attention: AttentionImplementation  # reads prefixes in the batch
    fuses_heads: bool  # are QK norm, RoPE and the write to the KV cache one kernel?
    kv_copies: int = 1  # how many shards hold each KV head
    fuses_gate: bool = False  # is the MLP's first GEMM one kernel with its activation, in trunks?

    def __call__(
        self,
        spec: ProgramSpec,
        weights: ModelWeights,
        kv_cache: KVCacheArrays,
        inputs: Inputs,
        mask: jax.Array | None,
        embedded: jax.Array | None = None,
        lora: Adapters | None = None,
    ) -> tuple[LastLayer, KVCacheArrays]:
        """Everything up to the last layer's attention, and the KV cache. `embedded`: the tokens' embeddings, where they
        are computed before."""
        # The layers are compiled by themselves, so that they give the same bits behind both kinds of embeddings.
        x = self.embed(weights.embedding, inputs.token_ids) if embedded is None else embedded
        x = lax.optimization_barrier(x)
        rope = self._rope_table(self.config.rope, inputs.positions)
        local_rope = rope
        if self.config.local_rope is not None:
            local_rope = self._rope_table(self.config.local_rope, inputs.positions)
        rows = None if lora is None else LoraRows(lora, inputs.lora_slots)

        def attend(layer: Any, x: jax.Array, kv_cache: KVCacheArrays) -> tuple[jax.Array, KVCacheArrays]:
            base = jnp.asarray(layer * (len(kv_cache.keys) // self.config.num_layers), jnp.int32)
            write = CacheWrite(kv_cache, inputs.cache_slots, base) if spec.writes_cache else None
            layer_rope = rope
            if self.config.local_rope is not None:
                is_local = jnp.array(self.config.layer_windows)[layer] > 0
                layer_rope = jax.tree.map(partial(jnp.where, is_local), local_rope, rope)
            heads, written = self._project(weights.layers, layer, x, layer_rope, inputs, write, lora)
            kv_cache = written or kv_cache  # before attention: segments read what others of the batch cache
            source = Source(kv_cache.keys, kv_cache.values, base) if spec.reads == "kv_cache" else None
            return self._attend(spec, heads, source, inputs, mask, self._scoring(layer)), kv_cache

        def finish(layer: Any, x: jax.Array, attended: jax.Array, num_tiles: jax.Array) -> jax.Array:
            return self._finish(weights.layers, layer, x, attended, num_tiles, rows)

        x, attended, kv_cache = self._run_layers(attend, finish, x, kv_cache, inputs.num_token_tiles[0])
        if self.config.pooling == "mean":
            x = self.rows.over_tokens(partial(self._final_norm, weights), inputs.num_token_tiles[0], x)
        return LastLayer(x, attended), kv_cache

    def _run_layers(
        self, attend: Attend, finish: Finish, x: jax.Array, kv_cache: KVCacheArrays, num_tiles: jax.Array
    ) -> Layers:
        """The last layer's input (its output, where the mean of a segment is scored), the output of its attention, and
        the KV cache. Where rows run in tiles, all layers are one loop: the last one finishes none of them."""
        num_layers = self.config.num_layers
        num_finished = num_layers - (self.config.pooling != "mean")
        num_looped = num_finished if self.rows.token_rows is None else num_layers
        is_one_loop = num_looped == num_layers
        attend = attend if is_one_loop else jax.jit(attend)  # traced once for both places

        def body(carry: Layers, layer: jax.Array) -> tuple[Layers, None]:
            x, kept, kv_cache = carry
            attended, kv_cache = attend(layer, x, kv_cache)
            x = finish(layer, x, attended, jnp.where(layer < num_finished, num_tiles, 0))
            return (x, attended if is_one_loop else kept, kv_cache), None

        width = self.kv_heads * self.heads_per_kv * self.config.head_size
        begun = x, jnp.zeros((len(x) if is_one_loop else 0, width), x.dtype), kv_cache
        (x, attended, kv_cache), _ = lax.scan(body, begun, jnp.arange(num_looped))
        if not is_one_loop:
            attended, kv_cache = attend(jnp.int32(num_layers - 1), x, kv_cache)
        return x, attended, kv_cache

    def embed(
        self, embedding: jax.Array, token_ids: jax.Array, overrides: tuple[jax.Array, jax.Array] | None = None
    ) -> jax.Array:
        """[T, D]. `overrides`: tokens [E], and the rows [E, D] in place of theirs; token T is padding."""
        x = look_up(embedding, token_ids, self.tp_size)
        if overrides is not None:
            x = x.at[overrides[0]].set(overrides[1], mode="drop")
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)  # rounded to x's dtype, as transformers does

    def _rope_table(self, rope: RopeConfig, positions: jax.Array) -> RopeTable:
        frequencies = jnp.asarray(rope.inverse_frequencies(self.config.head_size))
        angles = positions.astype(jnp.float32)[:, None, None] * frequencies
        cos, sin, magnitudes = jnp.cos(angles), jnp.sin(angles), rope.magnitudes(self.config.head_size)
        return RopeTable(cos, sin) if magnitudes is None else RopeTable(cos * magnitudes, sin * magnitudes)

    def _project(
        self,
        layers: LayerWeights,
        layer: Any,
        x: jax.Array,
        rope: RopeTable,
        inputs: Inputs,
        write: CacheWrite | None,
        lora: Adapters | None = None,
    ) -> tuple[Heads, KVCacheArrays | None]:
        """Norm, Q K V projection, QK norm and RoPE; and the KV cache, where something is written to it."""
        weights, eps, num_kv_heads = _at(layers, layer), self.config.norm_eps, self.kv_heads

        is_whole = self.config.whole_qk_norm

        slots = () if lora is None else (inputs.lora_slots,)

        def project(tile: jax.Array, *slots: jax.Array) -> jax.Array:
            normed = tile if weights.attention_norm is None else rms_norm(tile, weights.attention_norm, eps)
            qkv = layer_linear(weights, "qkv", normed, bias=weights.qkv_bias)
            qkv = adding(lora, layer, slots)("qkv", normed, qkv)
            qkv = self._norm_all_heads(weights, qkv) if is_whole else qkv
            return qkv.reshape(len(tile), -1, self.config.head_size)

        def project_and_rope(tile: jax.Array, cos: jax.Array, sin: jax.Array, *slots: jax.Array) -> jax.Array:
            norms = (None, None) if is_whole else (weights.q_norm, weights.k_norm)
            return qk_norm_rope(project(tile, *slots), num_kv_heads, norms, eps, RopeTable(cos, sin))

        num_tiles = inputs.num_token_tiles[0]
        if self.fuses_heads:
            qkv = self.rows.over_tokens(project, num_tiles, x, *slots)
            norms = HeadNorms(None, None) if is_whole else HeadNorms(layers.q_norm, layers.k_norm)
            number = jnp.asarray(layer, jnp.int32)
            qkv, kv_cache = qk_norm_rope_and_cache(qkv, num_kv_heads, norms, number, eps, rope, write)
            return Heads(qkv, num_kv_heads), kv_cache
        heads = Heads(self.rows.over_tokens(project_and_rope, num_tiles, x, *rope, *slots), num_kv_heads)
        return heads, None if write is None else write_cache(write, heads.k, heads.v)

    def _norm_all_heads(self, layer: LayerWeights, qkv: jax.Array) -> jax.Array:
        """Norm the queries [T, Kl Gl H] of all shards as one vector, and the keys; heads of zeros add nothing."""
        config, sizes = self.config, (self.kv_heads * self.heads_per_kv, self.kv_heads)
        edges = [sizes[0] * config.head_size, sum(sizes) * config.head_size]
        q, k, v = jnp.split(qkv, edges, axis=1)

        def norm(x: jax.Array, weight: jax.Array, num_heads: int, copies: int) -> jax.Array:
            wide = x.astype(jnp.float32)
            squares = jnp.sum(wide * wide, axis=-1, keepdims=True)
            if self.tp_size > 1:
                squares = lax.psum(squares, TENSOR)
            mean_square = squares / (copies * num_heads * config.head_size)
            return (wide * lax.rsqrt(mean_square + config.norm_eps) * weight.astype(jnp.float32)).astype(x.dtype)

        assert layer.q_norm is not None and layer.k_norm is not None
        q = norm(q, layer.q_norm, config.num_heads, 1)
        k = norm(k, layer.k_norm, config.num_kv_heads, self.kv_copies)
        return jnp.concatenate([q, k, v], axis=1)

    def attention_for(self, spec: ProgramSpec) -> AttentionImplementation:
        """The implementation of a program's attention, unless its mask is dense. XLA's takes any number of tokens."""
        chosen = self.attention if spec.reads == "kv_cache" else self.batch_attention
        return chosen if chosen.max_tokens is None or spec.num_tokens <= chosen.max_tokens else _UNBOUNDED

    def _scoring(self, layer: Any) -> Scoring:
        """Layers run in a loop, so a layer's window is data."""
        config = self.config
        window: jax.Array | None = None
        if any(config.windows):
            window = jnp.array([each or NO_WINDOW for each in config.windows], jnp.int32)[layer]
        return Scoring(window, config.score_scale, config.score_softcap, config.is_causal)

    def _attend(
        self,
        spec: ProgramSpec,
        heads: Heads,
        kv_cache: Source | None,
        inputs: Inputs,
        mask: jax.Array | None,
        scoring: Scoring,
    ) -> jax.Array:
        """[T, N H]. `kv_cache`: one layer of it, where prefixes are; None: prefixes are in the batch."""
        attention = self.attention_for(spec)
        if kv_cache is not None:
            out = extend_attention(heads, kv_cache, inputs.tiles, attention, scoring)
        else:
            dense = None
            if mask is not None:
                dense = DenseMask(mask, inputs.token_sequence, inputs.sequence_starts, inputs.num_sequences[0])
            out = packed_attention(heads, inputs.tiles, attention, dense, scoring)
        return out.reshape(len(out), -1)

    def _finish(
        self,
        layers: LayerWeights,
        number: Any,
        x: jax.Array,
        attended: jax.Array,
        num_tiles: jax.Array | None = None,
        lora: LoraRows | None = None,
    ) -> jax.Array:
        """Output projection, residual, MLP or experts, residual: of the first tiles of rows, or of all rows at once.
        Rows behind these tiles stay as they are."""

        def over_rows(function: Callable[..., Any], *inputs: jax.Array, into: jax.Array | None = None) -> Any:
            if num_tiles is None:
                return function(*inputs)
            return self.rows.over_tokens(function, num_tiles, *inputs, into=into)

        layer = _at(layers, number)
        if self.config.experts is None:
            if lora is None:
                gated = None
                if self.fuses_gate and num_tiles is not None:
                    gated = partial(self._gated, layers.gate_up, number)
                return over_rows(partial(self._finish_dense, layer, gated=gated), x, attended, into=x)
            adapted = partial(self._finish_adapted, layer, number, lora.adapters)
            return over_rows(adapted, x, attended, lora.slots, into=x)

        def begin(tile: jax.Array, attended_tile: jax.Array) -> tuple[jax.Array, jax.Array, Routing]:
            tile, normed = self._add_attended(layer, tile, attended_tile)
            assert layer.router is not None and self.config.experts is not None
            return tile, normed, route(linear(normed.astype(jnp.float32), layer.router), self.config.experts)

        def end(tile: jax.Array, weights: jax.Array, of_choices: jax.Array) -> jax.Array:
            total = add_outputs(weights, outputs, of_choices)
            total = lax.psum(total, TENSOR) if self.tp_size > 1 else total
            return self._add_mlp(layer, tile, total.astype(tile.dtype))

        residual, normed, routing = over_rows(begin, x, attended)
        num_tokens = len(x) if num_tiles is None or not self.rows.token_rows else num_tiles * self.rows.token_rows
        slots = assign_slots(routing.numbers, num_tokens, self.config.experts.num_experts, self.rows.expert_rows)
        outputs = self._run_experts(layers, number, normed, slots)
        return over_rows(end, residual, routing.weights, slots.of_choices, into=x)

    def _run_experts(self, layers: LayerWeights, number: Any, x: jax.Array, slots: Slots) -> jax.Array:
        """x [T, D] to the outputs of all slots [slots, D]; of one shard, in float32, where there are several."""
        assert self.config.experts is not None
        num_experts, tile_rows = self.config.experts.num_experts, self.rows.expert_rows

        def run(tokens: jax.Array, experts: jax.Array) -> jax.Array:
            gate_up, down = (
                expert_matrix(stacked, number, experts[0], num_experts) for stacked in (layers.gate_up, layers.down)
            )
            gate, up = jnp.split(linear(x[tokens], gate_up), 2, axis=-1)
            inner = activate(gate, self.config.activation) * up
            return linear(inner, down, jnp.float32 if self.tp_size > 1 else None)

        # A GPU would wait for the host to read the number of tiles, so there all run that there may be.
        num_tiles: Any = len(slots.tokens) // tile_rows if self.rows.token_rows is None else slots.num_tiles
        outputs: jax.Array = map_rows(run, tile_rows, num_tiles, len(slots.tokens), (slots.tokens, slots.experts))
        return outputs

    def _finish_adapted(
        self,
        layer: LayerWeights,
        number: Any,
        adapters: Adapters,
        x: jax.Array,
        attended: jax.Array,
        slots: jax.Array,
    ) -> jax.Array:
        return self._finish_dense(layer, x, attended, adding(adapters, number, (slots,)))

    def _finish_dense(
        self,
        layer: LayerWeights,
        x: jax.Array,
        attended: jax.Array,
        add: AddLora = no_lora,
        *,
        gated: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        x, normed = self._add_attended(layer, x, attended, add)
        if gated is not None:
            inner = gated(normed)
        else:
            gate, up = jnp.split(add("gate_up", normed, layer_linear(layer, "gate_up", normed)), 2, axis=-1)
            inner = activate(gate, self.config.activation) * up
        return self._add_mlp(layer, x, add("down", inner, self._sum_over_shards(layer, "down", inner)))

    def _gated(self, stacked: jax.Array, number: Any, x: jax.Array) -> jax.Array:
        """x [T, D] times a layer of the matrices [L, 2 F, D], activated, to [T, F]."""
        from prefixwise.backends.jax.hopper_gemm import gated_gemm

        return gated_gemm(x, stacked, jnp.asarray(number, jnp.int32), self.config.activation)

    def _add_attended(
        self, layer: LayerWeights, x: jax.Array, attended: jax.Array, add: AddLora = no_lora
    ) -> tuple[jax.Array, jax.Array]:
        """The output projection added to x, and its norm for the MLP; some models have a norm before the residual."""
        eps = self.config.norm_eps
        projected = add("o", attended, self._sum_over_shards(layer, "o", attended))
        if layer.post_attention_norm is not None:
            projected = rms_norm(projected, layer.post_attention_norm, eps)
        x = x + self._scaled(projected)
        return x, x if layer.mlp_norm is None else rms_norm(x, layer.mlp_norm, eps)

    def _add_mlp(self, layer: LayerWeights, x: jax.Array, mlp: jax.Array) -> jax.Array:
        if layer.post_mlp_norm is not None:
            mlp = rms_norm(mlp, layer.post_mlp_norm, self.config.norm_eps)
        return x + self._scaled(mlp)

    def _scaled(self, delta: jax.Array) -> jax.Array:
        """What is added to the residual stream. The factor is not rounded to a smaller dtype, as in transformers."""
        if self.config.residual_scale == 1.0:
            return delta
        return (delta.astype(jnp.float32) * self.config.residual_scale).astype(delta.dtype)

    def _sum_over_shards(self, layer: LayerWeights, matrix: Matrix, x: jax.Array) -> jax.Array:
        """A GEMM whose inner dimension is split over the shards: rounded once, after the sum."""
        if self.tp_size == 1:
            return layer_linear(layer, matrix, x)
        return lax.psum(layer_linear(layer, matrix, x, jnp.float32), TENSOR).astype(x.dtype)

    def score(
        self, weights: ModelWeights, last: LastLayer, tokens: jax.Array, lora: Adapters | None = None
    ) -> jax.Array:
        """Hidden states of the scored tokens after the final norm, [S, D] float32. Only these tokens run through the
        rest of the last layer. Where the mean of a segment is scored, the trunk has done that for all tokens. With
        LoRA, the slots of the tokens are behind them."""
        if self.config.pooling == "mean":
            return mean_of_segments(last.x, *jnp.split(tokens, 2))
        last_layer = self.config.num_layers - 1
        rows = None
        if lora is not None:
            tokens, slots = jnp.split(tokens, 2)
            rows = LoraRows(lora, slots)
        hidden = self._finish(weights.layers, last_layer, last.x[tokens], last.attended[tokens], lora=rows)
        return self._final_norm(weights, hidden)

    def _final_norm(self, weights: ModelWeights, x: jax.Array) -> jax.Array:
        return rms_norm(x, weights.final_norm, self.config.norm_eps).astype(jnp.float32)


def _at(layers: LayerWeights, layer: Any) -> LayerWeights:
    """One layer of the stacked weights."""
    return jax.tree.map(lambda stacked: stacked[layer], layers)


def look_up(table: jax.Array, ids: jax.Array, tp_size: int) -> jax.Array:
    """Rows of a table [V, D] whose rows are split over the shards."""
    if tp_size == 1:
        return table[ids]
    local = ids - lax.axis_index(TENSOR) * len(table)
    is_here = (local >= 0) & (local < len(table))
    rows = jnp.where(is_here[:, None], table[jnp.clip(local, 0, len(table) - 1)], 0)
    return lax.psum(rows, TENSOR)
