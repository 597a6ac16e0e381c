"""All layers up to the last one's attention, over buffers that stay where they are: what a CUDA graph can hold.

The same arithmetic as `model.py`, with its roundings. A residual is added in the pass that takes the next norm, so
there is no pass for it alone. What follows, of the few tokens that are scored, is `Transformer.finish_scored`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefixwise.backends.torch.cuda.attention import KeySource, PagedAttention
from prefixwise.backends.torch.cuda.fused_elementwise import add_norm, gate, linear, norm, qk_norm_rope
from prefixwise.backends.torch.cuda.inputs import ForwardInputs, ProgramSpec
from prefixwise.backends.torch.cuda.kv_cache import KVCache
from prefixwise.backends.torch.cuda.workspace import Buffers
from prefixwise.backends.torch.weights import LayerWeights, ModelWeights
from prefixwise.models.config import ModelConfig


@dataclass(frozen=True)
class Trunk:
    """Weights, sizes and the pool; holds nothing of a request."""

    config: ModelConfig
    weights: ModelWeights
    attention: PagedAttention
    pool: KVCache
    block_rows: int | None  # rows of a product; None: all
    frequencies: Tensor  # [H / 2] float32, radians per position

    def __call__(self, spec: ProgramSpec, inputs: ForwardInputs[Tensor], buffers: Buffers) -> None:
        """Leaves in `buffers` what the last layer adds up: `x`, and `attended` where tokens are scored."""
        layers, eps = self.weights.layers, self.config.norm_eps
        self._embed(inputs, buffers)
        norm(buffers.x, layers[0].attention_norm, eps, buffers.normed)
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            source = self._project(spec, number, layer, inputs, buffers)
            if is_last and not spec.scores:
                return  # a prefill: the last layer's keys and values were all that was missing
            self.attention(buffers.qkv, source, inputs.tiles, buffers.attended, buffers.lse)
            if is_last:
                return
            self._finish(layer, buffers)
            add_norm(buffers.x, buffers.delta, layers[number + 1].attention_norm, eps, buffers.normed)

    def _embed(self, inputs: ForwardInputs[Tensor], buffers: Buffers) -> None:
        torch.index_select(self.weights.embedding, 0, inputs.token_ids, out=buffers.x)
        if self.config.embedding_scale != 1.0:
            # Rounded to the embedding's dtype, as transformers does.
            buffers.x.mul_(torch.tensor(self.config.embedding_scale, dtype=buffers.x.dtype).item())
        torch.mul(inputs.positions.to(torch.float32)[:, None], self.frequencies, out=buffers.sin)
        torch.cos(buffers.sin, out=buffers.cos)
        torch.sin(buffers.sin, out=buffers.sin)

    def _project(
        self, spec: ProgramSpec, number: int, layer: LayerWeights, inputs: ForwardInputs[Tensor], buffers: Buffers
    ) -> KeySource:
        """Q K V, their norms and rotation, and to the pool what is kept; gives the place where prefixes are read."""
        n, k, pool = self.config.num_heads, self.config.num_kv_heads, self.pool.layer(number)
        linear(buffers.normed, layer.qkv, layer.qkv_bias, buffers.qkv.flatten(1), self.block_rows)
        slots = inputs.cache_slots if spec.reads == "pool" else None
        qk_norm_rope(buffers.qkv, layer.qk_norm, self.config.norm_eps, buffers.cos, buffers.sin, slots, pool)
        return pool if spec.reads == "pool" else KeySource(buffers.qkv, buffers.qkv, n, n + k)

    def _finish(self, layer: LayerWeights, buffers: Buffers) -> None:
        """Output projection, residual, MLP; what it gives is still to be added to x."""
        linear(buffers.attended.flatten(1), layer.o, None, buffers.delta, self.block_rows)
        add_norm(buffers.x, buffers.delta, layer.mlp_norm, self.config.norm_eps, buffers.normed)
        linear(buffers.normed, layer.gate_up, None, buffers.gate_up, self.block_rows)
        gate(buffers.gate_up, self.config.activation, buffers.gated)
        linear(buffers.gated, layer.down, None, buffers.delta, self.block_rows)
