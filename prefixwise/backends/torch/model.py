"""The transformer in PyTorch, one forward pass for every attention layout. `head_gemms.py` has its head.

Everything but attention works on one token at a time and runs over *tiles of rows*. On a CPU a tile has one fixed
number of rows, the last tile padded, because a GEMM gives other bits for the same row when the number of rows changes;
that makes an item's score exact, and it keeps a tile's activations in cache. Tiles of twice that size and of its
halves, which are faster where there are many and few rows, are used where a probe shows the same bits. Threads share
the tiles. On a GPU one tile holds all rows; with `batch_invariant` it is padded to a count that was found to give the
same bits (`invariant_rows.py`), or tiles are fixed where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from prefixwise.backends.torch.attention import Attention
from prefixwise.backends.torch.devices import take, upload
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps
from prefixwise.backends.torch.experts import ExpertRunner, add_outputs, choose_tile_sizes, route
from prefixwise.backends.torch.fp8 import fp8_linear, round_to_fp8
from prefixwise.backends.torch.head_gemms import HEAD_ROW_TILES, exact_head_tiles
from prefixwise.backends.torch.invariant_rows import RowCounts
from prefixwise.backends.torch.kv_blocks import KeysValues
from prefixwise.backends.torch.linear import (
    RowTile,
    cut_evenly,
    cut_rows,
    exact_few_rows,
    exact_row_counts,
    is_exact,
    linear,
    pad_rows,
)
from prefixwise.backends.torch.lora import AddLora, LayerLora, LoraRows, no_lora
from prefixwise.backends.torch.weights import ExpertWeights, Float32Layers, LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.batch import ForwardBatch
from prefixwise.models.config import ModelConfig, RopeConfig

Matrix = Literal["qkv", "o", "gate_up", "down"]  # of a layer


@dataclass(frozen=True)
class RopeTable:
    """The RoPE table: cosines and sines of each token's position, [T, 1, H / 2], float32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rotary:
    """What RoPE tables are made of."""

    frequencies: Tensor  # [H / 2] float32, radians per position
    magnitudes: Tensor | None  # [H / 2] float32, of cosines and sines; None: 1

    @classmethod
    def on_device(cls, rope: RopeConfig, head_size: int, device: torch.device) -> Rotary:
        magnitudes = rope.magnitudes(head_size)
        return cls(
            torch.from_numpy(rope.inverse_frequencies(head_size)).to(device),
            None if magnitudes is None else torch.from_numpy(magnitudes).to(device),
        )

    def table(self, positions: Tensor) -> RopeTable:
        """The table of tokens at positions [T]."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.magnitudes is not None:
            cos, sin = cos * self.magnitudes, sin * self.magnitudes
        return RopeTable(cos.unsqueeze(1), sin.unsqueeze(1))


@dataclass(frozen=True)
class TransformerOutput:
    """Hidden states of the scored tokens after the final norm, and every layer's keys and values."""

    hidden: Tensor  # [R, D] float32
    keys_values: Tensor | None  # [layers, 2, tokens to cache, K, H]


class EmbeddingRows(NamedTuple):
    """Rows that take the place of tokens' rows of the embedding table."""

    tokens: Tensor  # [E]
    rows: Tensor  # [E, D] float32, rounded to the table's dtype

    def write(self, embedded: Tensor) -> None:
        """Into [T, D], before embeddings are scaled."""
        embedded[self.tokens] = self.rows.to(embedded.dtype)


def embedding_rows(batch: ForwardBatch, device: torch.device) -> EmbeddingRows | None:
    """The batch's embedding overrides on the device; None: it has none."""
    overrides = batch.embed_overrides
    if overrides is None:
        return None
    return EmbeddingRows(upload(overrides.tokens, device), upload(overrides.vectors, device))


class Transformer:
    """Weights and sizes; holds no state of a request."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        tile_rows: int | None,
        workers: Workers,
        elementwise_ops: ElementwiseOps = PLAIN,
        dtype: torch.dtype | None = None,  # of activations and KV cache: that of the weights, or float32
        row_counts: RowCounts | None = None,  # of GPUs: see `invariant_rows.py`
    ) -> None:
        self.config = config
        self.weights = weights
        self.tile_rows = tile_rows  # None: all rows in one tile
        self.row_counts = row_counts  # of GEMMs; None: any
        self._workers = workers
        self._ops = self.elementwise_ops = elementwise_ops
        self.dtype = dtype or weights.embedding.dtype
        is_widened = self.dtype != weights.embedding.dtype
        self._float32_layers = Float32Layers(weights.layers, workers) if is_widened else None
        self.head_tiles: tuple[int, ...] = HEAD_ROW_TILES[:1]
        self._tile_sizes: tuple[int, ...] = () if tile_rows is None else (tile_rows,)  # largest first
        self._cuts: dict[int, list[RowTile]] = {}  # by the number of rows
        self._is_exact: dict[int, bool] = {}  # by the rows of a tile: is a row's result that of `tile_rows`?
        self._few_rows: tuple[int, ...] = ()  # of a forward of one tile that has less than the smallest, least first
        if tile_rows is not None and elementwise_ops.is_for_cpu:  # probed on one thread, as GEMMs run
            self._few_rows = workers.drive(lambda: exact_few_rows(self._layer(0), tile_rows, self.dtype))
            self._tile_sizes = workers.drive(lambda: exact_row_counts(self._layer(0), tile_rows, self.dtype))
            self.head_tiles = workers.drive(lambda: exact_head_tiles(weights.head))
        self._run_experts = self._expert_runner()
        device = weights.embedding.device
        # Rounded to the embedding's dtype, as transformers does.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype, device=device)
        self.rotary = Rotary.on_device(config.rope, config.head_size, device)
        self.local_rotary = Rotary.on_device(config.local_rope or config.rope, config.head_size, device)

    @property
    def smallest_tile(self) -> int | None:
        """Forwards are best padded to a multiple of this many rows, or to `fewer_rows`; None: any number."""
        return self._tile_sizes[-1] if self._tile_sizes else None

    def fewer_rows(self, num_rows: int) -> int | None:
        """The fewest rows that hold so many and make one tile, if that is less than the smallest one."""
        return next((few for few in self._few_rows if few >= num_rows), None)

    def __call__(
        self,
        token_ids: Tensor,  # [T]
        positions: Tensor,  # [T]
        attention: Attention,
        prefixes: Sequence[KeysValues] | None,  # per layer: the cached KV blocks of all prefixes, one after the other
        score_tokens: Tensor,  # [R] tokens whose hidden states are returned
        cache_tokens: Tensor | slice | None,  # tokens whose keys and values go to the KV cache
        overrides: EmbeddingRows | None = None,
        lora: LoraRows | None = None,  # of all tokens
        scored_lora: LoraRows | None = None,  # of the scored ones
    ) -> TransformerOutput:
        self._plan_cut(len(token_ids))
        self._plan_cut(len(score_tokens))
        x = self._embed(token_ids, overrides)
        rope = local_rope = self.rotary.table(positions)
        if self.config.local_rope is not None:
            local_rope = self.local_rotary.table(positions)
        cached = None if cache_tokens is None else self._empty_keys_values(cache_tokens)
        layers = () if cached is None else cached.transpose(1, 2).unbind()  # each [tokens to cache, 2, K, H]
        last, windows, num_scored = self.config.num_layers - 1, self.config.layer_windows, len(score_tokens)
        for number in range(self.config.num_layers):
            layer = self._layer(number)
            adapters = None if lora is None else lora.of_layer(number)
            qkv = self._project(layer, x, local_rope if windows[number] else rope, adapters)
            if cached is not None and cache_tokens is not None:
                keys_values = take(qkv, cache_tokens)[:, self.config.num_heads :]
                layers[number].copy_(keys_values.view(layers[number].shape))
            if number == last and not num_scored:
                break  # a prefill needs no more than the last layer's keys and values
            prefix = None if prefixes is None else prefixes[number]
            attended = attention(qkv, self.config.num_heads, prefix, windows[number]).flatten(1)
            if number < last:
                x = self._finish(layer, x, attended, adapters)
        if not num_scored:
            return TransformerOutput(x.new_empty(0, self.config.model_size, dtype=torch.float32), cached)
        hidden = self.finish(take(x, score_tokens), take(attended, score_tokens), scored_lora)
        return TransformerOutput(hidden, cached)

    def finish(self, x: Tensor, attended: Tensor, lora: LoraRows | None = None) -> Tensor:
        """The rest of the last layer and the final norm: x [R, D] and attended [R, N H] to [R, D] float32."""
        last = self.config.num_layers - 1
        x = self._finish(self._layer(last), x, attended, None if lora is None else lora.of_layer(last))
        return self._by_tiles(self._final_norm, x.shape[1:], x, dtype=torch.float32)

    def _expert_runner(self) -> ExpertRunner | None:
        experts = self.weights.layers[0].experts
        if experts is None:
            return None
        is_cpu, is_invariant = self._ops.is_for_cpu, self.tile_rows is not None or self.row_counts is not None
        sizes = self._workers.drive(
            lambda: choose_tile_sizes(experts, self.dtype, is_cpu=is_cpu, is_invariant=is_invariant)
        )
        return ExpertRunner(self.config, self._ops, self._workers, sizes)

    def _layer(self, number: int) -> LayerWeights:
        layers = self._float32_layers
        return self.weights.layers[number] if layers is None else layers.read(number)

    def _embed(self, token_ids: Tensor, overrides: EmbeddingRows | None) -> Tensor:
        x = self.weights.embedding[token_ids]
        if overrides is not None:
            overrides.write(x)
        x = x.to(self.dtype)
        return x if self.config.embedding_scale == 1.0 else x * self._embedding_scale

    def _empty_keys_values(self, tokens: Tensor | slice) -> Tensor:
        num_tokens = tokens.stop - tokens.start if isinstance(tokens, slice) else len(tokens)
        shape = (self.config.num_layers, 2, num_tokens, self.config.num_kv_heads, self.config.head_size)
        return self.weights.embedding.new_empty(shape, dtype=self.dtype)

    def _final_norm(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.weights.final_norm, self.config.norm_eps).float()

    def _by_tiles(
        self,
        function: Callable[..., Tensor],
        shape: Sequence[int],
        *inputs: Tensor,
        lora: LayerLora | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Apply a row-wise function to each tile, to rows of this shape and dtype; None: that of the first input.
        Copies of its first row pad a short last tile. With `lora`, the function gets an `AddLora` behind its inputs."""
        num_rows = inputs[0].shape[0]
        tiles = self.cut(num_rows)
        if tiles == [(0, num_rows)]:
            return function(*inputs, *_adding(lora, tiles[0]))
        out = inputs[0].new_empty((num_rows, *shape), dtype=dtype or inputs[0].dtype)

        def apply(tile: RowTile) -> None:
            start, stop = tile
            padded = [pad_rows(each[start:stop], stop - start) for each in inputs]
            out[start:stop] = function(*padded, *_adding(lora, tile))[: num_rows - start]

        self._workers.run(apply, tiles)
        return out

    def cut(self, num_rows: int) -> list[RowTile]:
        """The rows of GEMMs."""
        if self.row_counts is not None:
            return self.row_counts.cut(num_rows)
        if not self._tile_sizes or num_rows in self._few_rows:
            return [(0, num_rows)]
        return self._cuts.get(num_rows) or cut_rows(num_rows, self._tile_sizes, self._workers.num_threads)

    def _plan_cut(self, num_rows: int) -> None:
        """Cut evenly if a probe shows the same bits. Before any layer is read: a probe reads the first."""
        tile_rows = self.tile_rows
        if tile_rows is None or num_rows in self._cuts or not (self._ops.is_for_cpu and self._tile_sizes):
            return
        tiles = cut_evenly(num_rows, self._tile_sizes, self._workers.num_threads)
        counts = {stop - start for start, stop in tiles} - {*self._tile_sizes, *self._is_exact}
        self._is_exact |= {count: is_exact(self._layer(0), tile_rows, self.dtype, count) for count in counts}
        if all(self._is_exact.get(stop - start, True) for start, stop in tiles):
            self._cuts[num_rows] = tiles
        else:
            self._cuts[num_rows] = cut_rows(num_rows, self._tile_sizes, self._workers.num_threads)

    def _project(self, layer: LayerWeights, x: Tensor, rope: RopeTable, lora: LayerLora | None = None) -> Tensor:
        """Norm, QKV projection, QK norm and RoPE: queries, keys and values [T, N + 2 K, H]."""
        config, ops = self.config, self._ops
        n, kv, h = config.num_heads, config.num_kv_heads, config.head_size

        def project(tile: Tensor, cos: Tensor, sin: Tensor, add: AddLora = no_lora) -> Tensor:
            if layer.attention_norm is not None:
                tile = ops.norm(tile, layer.attention_norm, config.norm_eps)
            qkv = add("qkv", tile, self._linear(layer, "qkv", tile, layer.qkv_bias)).view(-1, n + 2 * kv, h)
            head_norm = layer.qk_norm
            if head_norm is not None and config.whole_qk_norm:
                for heads in (slice(0, n), slice(n, n + kv)):
                    whole, weight = qkv[:, heads].flatten(1), head_norm[heads].flatten()
                    qkv[:, heads] = ops.norm(whole, weight, config.norm_eps).view_as(qkv[:, heads])
                head_norm = None
            return ops.qk_norm_rope(qkv, n + kv, head_norm, config.norm_eps, cos, sin)

        return self._by_tiles(project, (n + 2 * kv, h), x, rope.cos, rope.sin, lora=lora)

    def _finish(self, layer: LayerWeights, x: Tensor, attended: Tensor, lora: LayerLora | None = None) -> Tensor:
        """Output projection, residual, MLP, residual; some models have a norm before each residual."""
        ops = self._ops

        if layer.experts is not None:
            return self._finish_with_experts(layer, layer.experts, x, attended)

        def finish(tile: Tensor, attended_tile: Tensor, add: AddLora = no_lora) -> Tensor:
            tile, normed = self._add_attended(layer, tile, attended_tile, add)
            gated = ops.gate(add("gate_up", normed, self._linear(layer, "gate_up", normed)), self.config.activation)
            return self._add_mlp(layer, tile, add("down", gated, self._linear(layer, "down", gated)))

        return self._by_tiles(finish, x.shape[1:], x, attended, lora=lora)

    def _linear(self, layer: LayerWeights, matrix: Matrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, I] times a matrix of the layer to [R, O]; rows are quantised where the matrix is in FP8."""
        weight = getattr(layer, matrix)
        if layer.fp8_scales is None:
            return linear(x, weight, bias)
        has_static_scale = matrix == "o" and layer.attention_norm is not None  # folded into weights: `forward/fp8.py`
        quantise = self._ops.quantise
        if matrix == "down" and layer.mlp_norm is not None:
            quantise = self._ops.quantise_activations
        codes, row_scales = (round_to_fp8(x), None) if has_static_scale else quantise(x)
        return fp8_linear(codes, row_scales, weight, getattr(layer.fp8_scales, matrix), bias)

    def _add_attended(
        self, layer: LayerWeights, x: Tensor, attended: Tensor, add: AddLora = no_lora
    ) -> tuple[Tensor, Tensor]:
        """The output projection added to x, and its norm for the MLP."""
        ops, eps = self._ops, self.config.norm_eps
        attended = attended.to(x.dtype)
        projected = add("o", attended, self._linear(layer, "o", attended))
        if layer.post_attention_norm is not None:
            projected = ops.norm(projected, layer.post_attention_norm, eps)
        if self.config.residual_scale != 1.0:
            projected = projected * self.config.residual_scale
        if layer.mlp_norm is None:
            x = x + projected
            return x, x
        return ops.add_norm(x, projected, layer.mlp_norm, eps)

    def _add_mlp(self, layer: LayerWeights, x: Tensor, mlp: Tensor) -> Tensor:
        if layer.post_mlp_norm is not None:
            mlp = self._ops.norm(mlp, layer.post_mlp_norm, self.config.norm_eps)
        return x + (mlp if self.config.residual_scale == 1.0 else mlp * self.config.residual_scale)

    def _finish_with_experts(self, layer: LayerWeights, experts: ExpertWeights, x: Tensor, attended: Tensor) -> Tensor:
        """The same with experts for the MLP. They take their rows from all tiles, so tiles end before and begin behind
        them."""
        assert self.config.experts is not None and self._run_experts is not None
        size = x.shape[1]

        def begin(tile: Tensor, attended_tile: Tensor) -> Tensor:
            return torch.cat(self._add_attended(layer, tile, attended_tile), 1)

        def logits(tile: Tensor) -> Tensor:
            return linear(tile.float(), experts.router)

        def end(tile: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
            return self._add_mlp(layer, tile, add_outputs(weights, outputs))

        x, normed = self._by_tiles(begin, (2 * size,), x, attended).chunk(2, 1)
        if self._ops.has_grouped_gemm(experts):
            return self._add_mlp(layer, x.contiguous(), self._ops.run_experts(experts, normed, self.config))
        of_experts = self._by_tiles(logits, (self.config.experts.num_experts,), normed, dtype=torch.float32)
        routing = route(of_experts, self.config.experts)
        outputs = self._run_experts(experts, normed, routing.numbers)
        return self._by_tiles(end, (size,), x, routing.weights, outputs)


def _adding(lora: LayerLora | None, tile: RowTile) -> tuple[AddLora, ...]:
    return () if lora is None else (lora.adding(tile),)
