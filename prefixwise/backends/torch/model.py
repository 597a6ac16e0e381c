"""The transformer in PyTorch, one forward pass for every attention layout, and its head.

Everything but attention works on one token at a time and runs over *tiles of rows*. On a CPU a tile has one fixed
number of rows, the last tile padded, because a GEMM gives other bits for the same row when the number of rows changes;
that makes an item's score exact, and it keeps a tile's activations in cache. Tiles of twice that size and of its
halves, which are faster where there are many and few rows, are used where a probe shows the same bits. Threads share
the tiles. On a GPU one tile holds all rows; with `batch_invariant` it is padded to a count that was found to give the
same bits (`invariant_rows.py`), or tiles are fixed where there is none.

The head goes from the hidden state after an item to the logits of its labels, in float32. Only the label rows of the
head are multiplied, unless a request needs a probability over the whole vocabulary; then its log-sum-exp is taken in
tiles of the vocabulary, and no [rows, V] array ever exists. GEMMs of the head have fixed shapes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.attention import Attention
from prefixwise.backends.torch.devices import take, upload
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps
from prefixwise.backends.torch.experts import ExpertRunner, add_outputs, choose_tile_sizes, route
from prefixwise.backends.torch.fp8 import fp8_linear
from prefixwise.backends.torch.invariant_rows import MAX_GEMM_ROWS
from prefixwise.backends.torch.kv_blocks import KeysValues
from prefixwise.backends.torch.linear import (
    RowTile,
    cut_rows,
    exact_few_rows,
    exact_row_counts,
    linear,
    pad_rows,
)
from prefixwise.backends.torch.lora import AddLora, LayerLora, LoraRows, no_lora
from prefixwise.backends.torch.weights import ExpertWeights, Float32Layers, LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.batch import ForwardBatch
from prefixwise.models.config import ModelConfig, RopeConfig

HEAD_ROW_TILES = (64, 16)  # hidden states at a time: the second where few are left and a probe shows the same bits
LABEL_TILE = 16  # label rows of the head at a time
MAX_LABEL_SETS = 64  # whose rows of the head stay on the device
VOCAB_TILE = 8192  # vocabulary rows of the head at a time
CUDA_ROW_TILE, CUDA_VOCAB_TILE = 256, 32768  # the same for the whole vocabulary on a GPU: fewer and larger GEMMs

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
        row_unit: int | None = None,  # of GPUs: see `invariant_rows.py`
    ) -> None:
        self.config = config
        self.weights = weights
        self.tile_rows = tile_rows  # None: all rows in one tile
        self.row_unit = row_unit  # GEMMs have a multiple of so many rows; None: any number
        self._workers = workers
        self._ops = self.elementwise_ops = elementwise_ops
        self.dtype = dtype or weights.embedding.dtype
        is_widened = self.dtype != weights.embedding.dtype
        self._float32_layers = Float32Layers(weights.layers, workers) if is_widened else None
        self.head_tiles: tuple[int, ...] = HEAD_ROW_TILES[:1]
        self._tile_sizes: tuple[int, ...] = () if tile_rows is None else (tile_rows,)  # largest first
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
        x = self._embed(token_ids, overrides)
        rope = local_rope = self.rotary.table(positions)
        if self.config.local_rope is not None:
            local_rope = self.local_rotary.table(positions)
        cached = None if cache_tokens is None else self._empty_keys_values(cache_tokens)
        last, windows = self.config.num_layers - 1, self.config.layer_windows
        for number in range(self.config.num_layers):
            layer = self._layer(number)
            adapters = None if lora is None else lora.of_layer(number)
            q, k, v = self._project(layer, x, local_rope if windows[number] else rope, adapters)
            if cached is not None and cache_tokens is not None:
                cached[number, 0], cached[number, 1] = take(k, cache_tokens), take(v, cache_tokens)
            if number == last and not len(score_tokens):
                break  # a prefill needs no more than the last layer's keys and values
            prefix = None if prefixes is None else prefixes[number]
            attended = attention(q, k, v, prefix, windows[number]).view(len(x), -1)
            if number < last:
                x = self._finish(layer, x, attended, adapters)
        if not len(score_tokens):
            return TransformerOutput(x.new_empty(0, self.config.model_size, dtype=torch.float32), cached)
        return TransformerOutput(self.finish_scored(x, attended, score_tokens, scored_lora), cached)

    def finish_scored(self, x: Tensor, attended: Tensor, score_tokens: Tensor, lora: LoraRows | None = None) -> Tensor:
        """The rest of the last layer and the final norm, for the scored tokens alone: x [T, D] and attended [T, N H]
        to [R, D] float32."""
        x, attended = take(x, score_tokens), take(attended, score_tokens)
        last = self.config.num_layers - 1
        x = self._finish(self._layer(last), x, attended, None if lora is None else lora.of_layer(last))
        hidden = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return self._by_tiles(self._final_norm, hidden, x)

    def _expert_runner(self) -> ExpertRunner | None:
        experts = self.weights.layers[0].experts
        if experts is None:
            return None
        is_cpu, is_invariant = self._ops.is_for_cpu, self.tile_rows is not None or self.row_unit is not None
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
        self, function: Callable[..., Tensor], out: Tensor, *inputs: Tensor, lora: LayerLora | None = None
    ) -> Tensor:
        """Apply a row-wise function to each tile, into `out`. Copies of its first row pad a short last tile. With
        `lora`, the function gets an `AddLora` behind its inputs."""
        num_rows = len(out)
        tiles = self._cut(num_rows)
        if tiles == [(0, num_rows)]:
            return function(*inputs, *_adding(lora, tiles[0]))

        def apply(tile: RowTile) -> None:
            start, stop = tile
            padded = [pad_rows(each[start:stop], stop - start) for each in inputs]
            out[start:stop] = function(*padded, *_adding(lora, tile))[: num_rows - start]

        self._workers.run(apply, tiles)
        return out

    def _cut(self, num_rows: int) -> list[RowTile]:
        if self.row_unit is not None:
            padded = -(-num_rows // self.row_unit) * self.row_unit
            starts = range(0, padded, MAX_GEMM_ROWS)
            return [(start, min(start + MAX_GEMM_ROWS, padded)) for start in starts]
        if not self._tile_sizes or num_rows in self._few_rows:
            return [(0, num_rows)]
        return cut_rows(num_rows, self._tile_sizes, self._workers.num_threads)

    def _project(
        self, layer: LayerWeights, x: Tensor, rope: RopeTable, lora: LayerLora | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, QKV projection, QK norm and RoPE: q [T, N, H], k and v [T, K, H]."""
        config, ops = self.config, self._ops
        n, kv, h = config.num_heads, config.num_kv_heads, config.head_size

        def project(tile: Tensor, cos: Tensor, sin: Tensor, add: AddLora = no_lora) -> Tensor:
            if layer.attention_norm is not None:
                tile = ops.norm(tile, layer.attention_norm, config.norm_eps)
            qkv = add("qkv", tile, self._linear(layer, "qkv", tile, layer.qkv_bias)).view(len(tile), n + 2 * kv, h)
            head_norm = layer.qk_norm
            if head_norm is not None and config.whole_qk_norm:
                for heads in (slice(0, n), slice(n, n + kv)):
                    whole, weight = qkv[:, heads].flatten(1), head_norm[heads].flatten()
                    qkv[:, heads] = ops.norm(whole, weight, config.norm_eps).view_as(qkv[:, heads])
                head_norm = None
            return ops.qk_norm_rope(qkv, n + kv, head_norm, config.norm_eps, cos, sin)

        qkv = self._by_tiles(project, x.new_empty(len(x), n + 2 * kv, h), x, rope.cos, rope.sin, lora=lora)
        return qkv[:, :n], qkv[:, n : n + kv], qkv[:, n + kv :]

    def _finish(self, layer: LayerWeights, x: Tensor, attended: Tensor, lora: LayerLora | None = None) -> Tensor:
        """Output projection, residual, MLP, residual; some models have a norm before each residual."""
        ops = self._ops

        if layer.experts is not None:
            return self._finish_with_experts(layer, layer.experts, x, attended)

        def finish(tile: Tensor, attended_tile: Tensor, add: AddLora = no_lora) -> Tensor:
            tile, normed = self._add_attended(layer, tile, attended_tile, add)
            gated = ops.gate(add("gate_up", normed, self._linear(layer, "gate_up", normed)), self.config.activation)
            return self._add_mlp(layer, tile, add("down", gated, self._linear(layer, "down", gated)))

        return self._by_tiles(finish, torch.empty_like(x), x, attended, lora=lora)

    def _linear(self, layer: LayerWeights, matrix: Matrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, I] times a matrix of the layer to [R, O]; rows are quantised where the matrix is in FP8."""
        weight = getattr(layer, matrix)
        if layer.fp8_scales is None:
            return linear(x, weight, bias)
        return fp8_linear(*self._ops.quantise(x), weight, getattr(layer.fp8_scales, matrix), bias)

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
        num_rows, size = x.shape

        def begin(tile: Tensor, attended_tile: Tensor) -> Tensor:
            return torch.cat(self._add_attended(layer, tile, attended_tile), 1)

        def logits(tile: Tensor) -> Tensor:
            return linear(tile.float(), experts.router)

        def end(tile: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
            return self._add_mlp(layer, tile, add_outputs(weights, outputs))

        x, normed = self._by_tiles(begin, x.new_empty(num_rows, 2 * size), x, attended).chunk(2, 1)
        if self._ops.has_grouped_gemm(experts):
            return self._add_mlp(layer, x.contiguous(), self._ops.run_experts(experts, normed, self.config))
        of_experts = x.new_empty(num_rows, self.config.experts.num_experts, dtype=torch.float32)
        routing = route(self._by_tiles(logits, of_experts, normed), self.config.experts)
        outputs = self._run_experts(experts, normed, routing.numbers)
        return self._by_tiles(end, x.new_empty(x.shape), x, routing.weights, outputs)


def _adding(lora: LayerLora | None, tile: RowTile) -> tuple[AddLora, ...]:
    return () if lora is None else (lora.adding(tile),)


class LabelHead:
    """Reads label logits. The head's rows of the latest sets of labels stay on the device: most requests of a server
    have the same labels, and gathering these rows takes the host longer than the GEMM."""

    def __init__(self, head: Tensor, row_tiles: Sequence[int], softcap: float = 0.0) -> None:
        self._head, self._row_tiles, self._softcap = head, row_tiles, softcap
        self._known: dict[bytes, tuple[Tensor, Tensor]] = {}  # a tile of columns, and each label's among them

    def __call__(self, hidden: Tensor, label_ids: Int32Array) -> Tensor:
        """hidden [R, D] float32, label_ids [R, L] to [R, L] float32."""
        labels = label_ids[0]
        if len(labels) <= LABEL_TILE and (label_ids == labels).all():
            columns, places = self._columns(labels)
            return _capped(_in_row_tiles(hidden, columns, self._row_tiles).index_select(1, places), self._softcap)
        distinct, places_of_rows = np.unique(label_ids, return_inverse=True)
        rows = self._rows(distinct)
        tiles = [rows[start : start + LABEL_TILE].T for start in range(0, len(rows), LABEL_TILE)]
        place_of = upload(places_of_rows.reshape(label_ids.shape), self._head.device).long()
        logits = torch.cat([_in_row_tiles(hidden, tile, self._row_tiles) for tile in tiles], 1)
        return _capped(logits.gather(1, place_of), self._softcap)

    def _columns(self, labels: Int32Array) -> tuple[Tensor, Tensor]:
        """[D, LABEL_TILE] with the columns of these labels, and where each label is among them."""
        key = labels.tobytes()
        if key not in self._known:
            if len(self._known) == MAX_LABEL_SETS:
                self._known.clear()
            distinct, places = np.unique(labels, return_inverse=True)
            self._known[key] = self._rows(distinct).T, upload(places, self._head.device).long()
        return self._known[key]

    def _rows(self, token_ids: Int32Array) -> Tensor:
        """[n, D] float32; n is a multiple of LABEL_TILE."""
        return _padded_to_multiple(self._head[upload(token_ids, self._head.device).long()].float(), LABEL_TILE)


def logsumexp(hidden: Tensor, head: Tensor, workers: Workers, row_tiles: Sequence[int], softcap: float = 0.0) -> Tensor:
    """The log-sum-exp of all logits: hidden [R, D] float32, head [V, D] to [R] float32."""
    row_tiles, vocab_tile = _tile_sizes(hidden, row_tiles)
    vocab_starts = range(0, len(head), vocab_tile)
    parts = hidden.new_empty(len(vocab_starts), len(hidden))

    def sum_vocab_tile(number: int) -> None:
        columns = _columns(head[vocab_starts[number] :][:vocab_tile])
        for start, stop in cut_rows(len(hidden), row_tiles):
            logits = _capped(_logits(pad_rows(hidden[start:stop], stop - start), columns), softcap)
            parts[number, start:stop] = torch.logsumexp(_aligned_columns(logits), -1)[: len(hidden) - start]

    workers.run(sum_vocab_tile, range(len(vocab_starts)))
    return _sum_parts(parts)


class VocabularyScores(NamedTuple):
    """What one pass over the vocabulary gives for every scored token."""

    token_logits: Tensor  # [R] of one given token each
    logsumexp: Tensor  # [R]
    top_logits: Tensor  # [R, K]: the largest first
    top_ids: Tensor  # [R, K]


def score_vocabulary(
    hidden: Tensor,
    head: Tensor,
    token_ids: Tensor,
    top_k: int,
    workers: Workers,
    row_tiles: Sequence[int],
    softcap: float = 0.0,
) -> VocabularyScores:
    """Logits of given tokens, log-sum-exp and top-k: hidden [R, D] float32, head [V, D], token_ids [R].

    Tiles of the vocabulary are reduced one by one, and no [R, V] array exists.
    """
    row_tiles, vocab_tile = _tile_sizes(hidden, row_tiles)
    vocab_starts, num_rows = range(0, len(head), vocab_tile), len(hidden)
    sums, picked = hidden.new_empty(2, len(vocab_starts), num_rows)
    tops = hidden.new_full((num_rows, len(vocab_starts), top_k), float("-inf"))
    ids = torch.zeros(tops.shape, dtype=torch.long, device=hidden.device)

    def reduce_vocab_tile(number: int) -> None:
        first = vocab_starts[number]
        columns = _columns(head[first : first + vocab_tile])
        width, kept = columns.shape[1], min(top_k, columns.shape[1])
        for start, stop in cut_rows(num_rows, row_tiles):
            whole = _capped(_logits(pad_rows(hidden[start:stop], stop - start), columns), softcap)
            logits, rows = whole[: num_rows - start], slice(start, min(stop, num_rows))
            sums[number, rows] = torch.logsumexp(_aligned_columns(whole), -1)[: len(logits)]
            tops[rows, number, :kept], found = logits.topk(kept) if kept > 1 else logits.max(1, keepdim=True)
            ids[rows, number, :kept] = found + first
            places = (token_ids[rows] - first)[:, None]
            is_elsewhere = (places < 0) | (places >= width)
            found_logits = logits.gather(1, places.clamp(0, width - 1)).masked_fill(is_elsewhere, float("-inf"))
            picked[number, rows] = found_logits[:, 0]

    workers.run(reduce_vocab_tile, range(len(vocab_starts)))
    top_logits, places = tops.flatten(1).topk(top_k)
    return VocabularyScores(picked.amax(0), _sum_parts(sums), top_logits, ids.flatten(1).gather(1, places))


def _tile_sizes(hidden: Tensor, row_tiles: Sequence[int]) -> tuple[Sequence[int], int]:
    """Rows of hidden states, and of the vocabulary, of a GEMM over the vocabulary."""
    return ((CUDA_ROW_TILE,), CUDA_VOCAB_TILE) if hidden.is_cuda else (row_tiles, VOCAB_TILE)


def _columns(head: Tensor) -> Tensor:
    """Rows of the head [C, D] as `_logits` takes them: [D, C]."""
    is_multiplied_as_it_is = head.is_cuda and head.dtype == torch.bfloat16
    return head.T if is_multiplied_as_it_is else head.float().T


def _logits(hidden: Tensor, columns: Tensor) -> Tensor:
    """hidden [R, D] float32 times columns [D, C], in float32.

    A GPU multiplies bfloat16 some ten times as fast as float32: there, each hidden state is the sum of three bfloat16
    numbers, which together have all of its bits, and products are added up in float32.
    """
    if columns.dtype == torch.float32:
        return hidden @ columns
    high = hidden.bfloat16()
    middle = (hidden - high.float()).bfloat16()
    low = (hidden - high.float() - middle.float()).bfloat16()
    of_high, of_middle, of_low = torch.mm(torch.cat([high, middle, low]), columns, out_dtype=torch.float32).chunk(3)
    return of_low.add_(of_middle).add_(of_high)


def _sum_parts(parts: Tensor) -> Tensor:
    """The log-sum-exp of tiles [tiles, R] to that of the vocabulary, always in the same order."""
    lse = parts[0]
    for part in parts[1:]:
        lse = torch.logaddexp(lse, part)
    return lse


def _capped(logits: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(logits / softcap), in place; 0: the logits themselves."""
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def exact_head_tiles(head: Tensor) -> tuple[int, ...]:
    """Those of HEAD_ROW_TILES in whose GEMMs with the head a row has the same bits as in those of the first."""
    hidden = torch.randn(HEAD_ROW_TILES[0], head.shape[1], generator=torch.Generator().manual_seed(0))
    last = len(head) // VOCAB_TILE * VOCAB_TILE
    labels = _padded_to_multiple(head[:LABEL_TILE], LABEL_TILE)
    shapes = [each.float().T for each in (labels, head[:VOCAB_TILE], head[last:]) if len(each)]
    return tuple(
        size
        for size in HEAD_ROW_TILES
        if all(torch.equal(_in_row_tiles(hidden, each, (size,)), hidden @ each) for each in shapes)
    )


def _in_row_tiles(hidden: Tensor, columns: Tensor, row_tiles: Sequence[int]) -> Tensor:
    """hidden [R, D] times columns [D, C], in GEMMs of a few row counts; copies of the first row pad the last tile."""
    tiles = [pad_rows(hidden[start:stop], stop - start) @ columns for start, stop in cut_rows(len(hidden), row_tiles)]
    return torch.cat(tiles)[: len(hidden)]


def _aligned_columns(logits: Tensor) -> Tensor:
    """Columns of -inf up to a multiple of 16: CUDA sums other rows in an order that depends on their address."""
    return F.pad(logits, (0, -logits.shape[1] % 16), value=float("-inf"))


def _padded_to_multiple(rows: Tensor, multiple: int) -> Tensor:
    return pad_rows(rows, -(-len(rows) // multiple) * multiple)
