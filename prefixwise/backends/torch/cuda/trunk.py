"""All layers up to the last one's attention, over buffers whose addresses stay the same: what a CUDA graph can hold.

The arithmetic and its roundings are those of `model.py`. A residual is added in the pass that takes the next norm, so
it needs no pass of its own. `Transformer.finish_scored` does the rest for the few tokens that are scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from prefixwise.backends.torch.cuda.attention import PagedAttention
from prefixwise.backends.torch.cuda.fused_elementwise import add_norm, gate, linear, norm, qk_norm_rope_and_cache
from prefixwise.backends.torch.cuda.inputs import ForwardInputs, ProgramSpec
from prefixwise.backends.torch.cuda.kv_cache import KeySource, KVCache
from prefixwise.backends.torch.model import EmbeddingRows, Rotary
from prefixwise.backends.torch.weights import LayerWeights, ModelWeights
from prefixwise.models.config import ModelConfig

_ALIGNMENT = 1024  # bytes


@dataclass(frozen=True)
class Buffers:
    """The activations of T tokens. `gate_up` and `gated` share memory with `qkv` and `attended`."""

    x: Tensor  # [T, D]
    normed: Tensor  # [T, D]
    delta: Tensor  # [T, D], to be added to x
    cos: Tensor  # [T, H / 2] float32
    sin: Tensor  # [T, H / 2] float32
    local_cos: Tensor  # [T, H / 2] float32, of layers with a window; empty where they have the same RoPE
    local_sin: Tensor  # [T, H / 2] float32
    lse: Tensor  # [T, N] float32
    qkv: Tensor  # [T, N + 2 K, H]
    attended: Tensor  # [T, N, H]
    gate_up: Tensor  # [T, 2 F]
    gated: Tensor  # [T, F]


class Workspace:
    """Memory for the activations of up to `num_tokens` tokens. All programs share it: they run one after the other."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype = config, dtype
        self._memory = torch.empty(_Cut.total(self._shapes(num_tokens)), dtype=torch.uint8, device=device)

    def _shapes(self, num_tokens: int) -> list[list[_Shape]]:
        """The buffers that always live, those that live until attention is done, and those that live after it."""
        config, t, wide = self._config, num_tokens, torch.float32
        d, n, k, h, f = config.model_size, config.num_heads, config.num_kv_heads, config.head_size, config.mlp_size
        local = ((t if config.local_rope is not None else 0, h // 2), wide)
        return [
            [*[((t, d), self._dtype)] * 3, *[((t, h // 2), wide)] * 2, *[local] * 2, ((t, n), wide)],
            [((t, n + 2 * k, h), self._dtype), ((t, n, h), self._dtype)],
            [((t, 2 * f), self._dtype), ((t, f), self._dtype)],
        ]

    def buffers(self, num_tokens: int) -> Buffers:
        """They overwrite the buffers of every other call."""
        always, before, after = self._shapes(num_tokens)
        cut = _Cut(self._memory)
        tensors = [cut.next(*shape) for shape in always]
        start = cut.at
        tensors += [cut.next(*shape) for shape in before]
        cut.at = start
        return Buffers(*tensors, *(cut.next(*shape) for shape in after))


_Shape = tuple[tuple[int, ...], torch.dtype]


class _Cut:
    """Cuts a piece of memory into tensors, one after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self.at = memory, 0

    def next(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        found = self._memory[self.at : self.at + num_bytes].view(dtype).view(shape)
        self.at += _aligned(num_bytes)
        return found

    @staticmethod
    def total(shapes: list[list[_Shape]]) -> int:
        """Bytes for the first list and the largest of the rest."""
        always, *rest = (sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in each) for each in shapes)
        return always + max(rest)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Trunk:
    """Weights, sizes and the KV cache; holds no state of a request."""

    config: ModelConfig
    weights: ModelWeights
    attention: PagedAttention
    kv_cache: KVCache
    tile_rows: int | None  # rows of a GEMM; None: all
    rotary: Rotary
    local_rotary: Rotary  # of layers with a window

    def __call__(self, spec: ProgramSpec, inputs: ForwardInputs[Tensor], buffers: Buffers) -> None:
        """Leaves the inputs of the last layer's end in `buffers`: `x`, and `attended` where tokens are scored."""
        layers, eps = self.weights.layers, self.config.norm_eps
        if not spec.is_embedded:
            self.embed(inputs, buffers)
        self._make_rope_tables(inputs, buffers)
        norm(buffers.x, _given(layers[0].attention_norm), eps, buffers.normed)
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            source = self._project(spec, number, layer, inputs, buffers)
            if is_last and not spec.scores:
                return  # a prefill needs no more than the last layer's keys and values
            window = self.config.layer_windows[number]
            self.attention(buffers.qkv, source, inputs.tiles, buffers.attended, buffers.lse, inputs.positions, window)
            if is_last:
                return
            self._finish(layer, buffers)
            add_norm(buffers.x, buffers.delta, _given(layers[number + 1].attention_norm), eps, buffers.normed)

    def embed(self, inputs: ForwardInputs[Tensor], buffers: Buffers, overrides: EmbeddingRows | None = None) -> None:
        """The tokens' embeddings into `x`."""
        torch.index_select(self.weights.embedding, 0, inputs.token_ids, out=buffers.x)
        if overrides is not None:
            overrides.write(buffers.x)
        if self.config.embedding_scale != 1.0:
            # Rounded to the embedding's dtype, as transformers does.
            buffers.x.mul_(torch.tensor(self.config.embedding_scale, dtype=buffers.x.dtype).item())

    def _make_rope_tables(self, inputs: ForwardInputs[Tensor], buffers: Buffers) -> None:
        tables = [(self.rotary, buffers.cos, buffers.sin)]
        if self.config.local_rope is not None:
            tables.append((self.local_rotary, buffers.local_cos, buffers.local_sin))
        for rotary, cos, sin in tables:
            torch.mul(inputs.positions.to(torch.float32)[:, None], rotary.frequencies, out=sin)
            torch.cos(sin, out=cos)
            torch.sin(sin, out=sin)
            if rotary.magnitudes is not None:
                cos.mul_(rotary.magnitudes)
                sin.mul_(rotary.magnitudes)

    def _project(
        self, spec: ProgramSpec, number: int, layer: LayerWeights, inputs: ForwardInputs[Tensor], buffers: Buffers
    ) -> KeySource:
        """QKV projection, QK norm, RoPE, and the write to the KV cache; returns where prefixes are read."""
        n, k, cache = self.config.num_heads, self.config.num_kv_heads, self.kv_cache.layer(number)
        linear(buffers.normed, layer.qkv, layer.qkv_bias, buffers.qkv.flatten(1), self.tile_rows)
        slots = inputs.cache_slots if spec.reads == "cache" else None
        cos, sin = buffers.cos, buffers.sin
        if self.config.local_rope is not None and self.config.layer_windows[number]:
            cos, sin = buffers.local_cos, buffers.local_sin
        qk_norm_rope_and_cache(buffers.qkv, layer.qk_norm, self.config.norm_eps, cos, sin, slots, cache)
        return cache if spec.reads == "cache" else KeySource(buffers.qkv, buffers.qkv, n, n + k)

    def _finish(self, layer: LayerWeights, buffers: Buffers) -> None:
        """Output projection, residual, MLP; `delta` is not yet added to x."""
        linear(buffers.attended.flatten(1), layer.o, None, buffers.delta, self.tile_rows)
        if layer.post_attention_norm is not None:
            norm(buffers.delta, layer.post_attention_norm, self.config.norm_eps, buffers.delta)
        add_norm(buffers.x, buffers.delta, _given(layer.mlp_norm), self.config.norm_eps, buffers.normed)
        linear(buffers.normed, _given(layer.gate_up), None, buffers.gate_up, self.tile_rows)
        gate(buffers.gate_up, self.config.activation, buffers.gated)
        linear(buffers.gated, _given(layer.down), None, buffers.delta, self.tile_rows)
        if layer.post_mlp_norm is not None:
            norm(buffers.delta, layer.post_mlp_norm, self.config.norm_eps, buffers.delta)


def _given(weight: Tensor | None) -> Tensor:
    assert weight is not None, "models without these parts are not run here (`kernel_choice.has_paged_attention`)"
    return weight
