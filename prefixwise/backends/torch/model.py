"""The transformer in PyTorch: one forward pass for every attention layout.

Everything but attention works on one token at a time and runs over *blocks of rows*. On a CPU a block has one fixed
number of rows, the last one padded, because matrix products give other bits for the same row when the number of rows
changes; that is what makes an item's score exact, and it keeps a block's activations in cache. Blocks of twice the size
and of its halves, which are faster where there are many and few rows, are used where a probe shows the same bits.
Blocks are shared out between threads. On a GPU one block holds everything unless `batch_invariant` asks for fixed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixwise.backends.torch.attention import Attention
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps
from prefixwise.backends.torch.linear import exact_row_counts, linear
from prefixwise.backends.torch.prefixes import KeysValues
from prefixwise.backends.torch.row_blocks import RowBlock, cut_rows
from prefixwise.backends.torch.weights import Float32Layers, LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers
from prefixwise.models.config import ModelConfig


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of each token's position, [T, 1, H / 2], float32."""

    cos: Tensor
    sin: Tensor

    def rows(self, start: int, stop: int) -> RopeTable:
        return RopeTable(self.cos[start:stop], self.sin[start:stop])


@dataclass(frozen=True)
class TransformerOutput:
    """Hidden states of the chosen tokens after the final norm, and every layer's keys and values."""

    hidden: Tensor  # [R, D] float32
    keys_values: Tensor | None  # [layers, 2, kept tokens, K, H]


class Transformer:
    """Weights and sizes; holds nothing of a request."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        block_rows: int | None,
        workers: Workers,
        elementwise_ops: ElementwiseOps = PLAIN,
        dtype: torch.dtype | None = None,  # of activations and KV cache: that of the weights, or float32
    ) -> None:
        self.config = config
        self.weights = weights
        self.block_rows = block_rows  # None: all rows in one block
        self._workers = workers
        self._row_ops = elementwise_ops
        self.dtype = dtype or weights.embedding.dtype
        is_widened = self.dtype != weights.embedding.dtype
        self._float32_layers = Float32Layers(weights.layers, workers) if is_widened else None
        self._block_sizes: tuple[int, ...] = () if block_rows is None else (block_rows,)  # largest first
        if block_rows is not None and elementwise_ops.is_for_cpu:  # probed on one thread, as GEMMs run
            self._block_sizes = workers.drive(lambda: exact_row_counts(self._layer(0), block_rows, self.dtype))
        device = weights.embedding.device
        # Rounded to the embedding's dtype, as transformers does.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype, device=device)
        # Radians per position, [H / 2] float32.
        self.frequencies = torch.from_numpy(config.rope.inverse_frequencies(config.head_size)).to(device)

    @property
    def smallest_block(self) -> int | None:
        """Rows that a forward is best padded to a multiple of; None: any number."""
        return self._block_sizes[-1] if self._block_sizes else None

    def __call__(
        self,
        token_ids: Tensor,  # [T]
        positions: Tensor,  # [T]
        attention: Attention,
        prefixes: Sequence[KeysValues] | None,  # per layer: the kept blocks of all prefixes, one after the other
        score_tokens: Tensor,  # [R] tokens whose hidden states are wanted
        keep_tokens: Tensor | slice | None,  # tokens whose keys and values are wanted
    ) -> TransformerOutput:
        x = self._embed(token_ids)
        rotation = self._rotation(positions)
        kept = None if keep_tokens is None else self._room_for(keep_tokens)
        last = self.config.num_layers - 1
        for number in range(self.config.num_layers):
            layer = self._layer(number)
            q, k, v = self._project(layer, x, rotation)
            if kept is not None:
                kept[number, 0], kept[number, 1] = k[keep_tokens], v[keep_tokens]
            if number == last and not len(score_tokens):
                break  # a prefill: the last layer's keys and values were all that was missing
            attended = attention(q, k, v, None if prefixes is None else prefixes[number]).view(len(x), -1)
            if number < last:
                x = self._finish(layer, x, attended)
        if not len(score_tokens):
            return TransformerOutput(x.new_empty(0, self.config.model_size, dtype=torch.float32), kept)
        return TransformerOutput(self.finish_scored(x, attended, score_tokens), kept)

    def finish_scored(self, x: Tensor, attended: Tensor, score_tokens: Tensor) -> Tensor:
        """The rest of the last layer and the final norm, of these tokens alone: x [T, D] and attended [T, N H] to
        [R, D] float32."""
        x = self._finish(self._layer(self.config.num_layers - 1), x[score_tokens], attended[score_tokens])
        hidden = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return self._by_blocks(self._final_norm, hidden, x)

    def _layer(self, number: int) -> LayerWeights:
        layers = self._float32_layers
        return self.weights.layers[number] if layers is None else layers.read(number)

    def _embed(self, token_ids: Tensor) -> Tensor:
        x = self.weights.embedding[token_ids].to(self.dtype)
        return x if self.config.embedding_scale == 1.0 else x * self._embedding_scale

    def _room_for(self, tokens: Tensor | slice) -> Tensor:
        num_tokens = tokens.stop - tokens.start if isinstance(tokens, slice) else len(tokens)
        shape = (self.config.num_layers, 2, num_tokens, self.config.num_kv_heads, self.config.head_size)
        return self.weights.embedding.new_empty(shape, dtype=self.dtype)

    def _rotation(self, positions: Tensor) -> RopeTable:
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        return RopeTable(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))

    def _final_norm(self, x: Tensor) -> Tensor:
        return self._row_ops.norm(x, self.weights.final_norm, self.config.norm_eps).float()

    def _by_blocks(self, function: Callable[..., Tensor], out: Tensor, *inputs: Tensor) -> Tensor:
        """Apply a row-wise function block by block into `out`; a short last block is padded with copies of its first
        row."""
        num_rows = len(out)
        if not self._block_sizes:
            return function(*inputs)

        def apply(block: RowBlock) -> None:
            start, stop = block
            blocks = [pad_rows(each[start:stop], stop - start) for each in inputs]
            out[start:stop] = function(*blocks)[: num_rows - start]

        self._workers.run(apply, cut_rows(num_rows, self._block_sizes, self._workers.num_threads))
        return out

    def _project(self, layer: LayerWeights, x: Tensor, rotation: RopeTable) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, Q K V, their norms and rotation: q [T, N, H], k and v [T, K, H]."""
        config, elementwise_ops = self.config, self._row_ops
        n, kv, h = config.num_heads, config.num_kv_heads, config.head_size

        def project(block: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            normed = elementwise_ops.norm(block, layer.attention_norm, config.norm_eps)
            qkv = linear(normed, layer.qkv, layer.qkv_bias).view(len(block), n + 2 * kv, h)
            return elementwise_ops.qk_norm_rope(qkv, n + kv, layer.qk_norm, config.norm_eps, cos, sin)

        qkv = self._by_blocks(project, x.new_empty(len(x), n + 2 * kv, h), x, rotation.cos, rotation.sin)
        return qkv[:, :n], qkv[:, n : n + kv], qkv[:, n + kv :]

    def _finish(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, MLP, residual."""
        elementwise_ops = self._row_ops

        def finish(block: Tensor, attended_block: Tensor) -> Tensor:
            projected = linear(attended_block.to(block.dtype), layer.o)
            block, normed = elementwise_ops.add_norm(block, projected, layer.mlp_norm, self.config.norm_eps)
            return block + linear(
                elementwise_ops.gate(linear(normed, layer.gate_up), self.config.activation), layer.down
            )

        return self._by_blocks(finish, torch.empty_like(x), x, attended)


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """[n, ..] to [size, ..] with copies of the first row."""
    missing = size - len(rows)
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows
