"""All layers up to the last one's attention, over buffers whose addresses stay the same: what a CUDA graph can hold.

The arithmetic and its roundings are those of `model.py`. A residual is added in the pass that takes the next norm, so
it needs no pass of its own; on Hopper GEMMs of many rows add it. `Transformer.finish` does the rest for the few tokens
that are scored.

In FP8 norms and the activation write codes and one scale per row, so GEMMs read half the bytes; attention writes codes,
whose scale is in the weights (`forward/fp8.py`). Where a GEMM activates, `rescale` finds the scales of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from prefixwise.backends.torch.cuda.attention import PagedAttention, Rows
from prefixwise.backends.torch.cuda.fp8_kernels import add_norm_fp8, gate_fp8, norm_fp8, rescale
from prefixwise.backends.torch.cuda.fused_elementwise import add_norm, gate, linear, norm, qk_norm_rope_and_cache
from prefixwise.backends.torch.cuda.inputs import ForwardInputs, ProgramSpec
from prefixwise.backends.torch.cuda.kv_cache import KeySource, KVCache
from prefixwise.backends.torch.cuda.lora_kernels import AdaptedLayer
from prefixwise.backends.torch.elementwise import ElementwiseOps
from prefixwise.backends.torch.fp8 import FP8
from prefixwise.backends.torch.linear import RowTile
from prefixwise.backends.torch.lora import LoraSlots
from prefixwise.backends.torch.model import EmbeddingRows, Matrix, Rotary
from prefixwise.backends.torch.weights import LayerWeights, ModelWeights
from prefixwise.forward.fp8 import ACTIVATION_PART
from prefixwise.models.config import ModelConfig

_ALIGNMENT = 1024  # bytes


@dataclass(frozen=True)
class Buffers:
    """The activations of T tokens. `gate_up` and `gated` share memory with those from `qkv` on. Behind `normed`,
    `attended` and `gated` are columns for LoRA adapters, where matrices have such columns. The rows of scored tokens
    are at the same addresses for every T."""

    scored_x: Tensor  # [S, D] of the first S scored tokens
    scored_attended: Tensor  # [T, N H] of all scored tokens
    x: Tensor  # [T, D]
    normed: Tensor  # [T, D + E], in FP8 its codes
    delta: Tensor  # [T, D], to be added to x
    cos: Tensor  # [T, H / 2] float32
    sin: Tensor  # [T, H / 2] float32
    local_cos: Tensor  # [T, H / 2] float32, of layers with a window; empty where they have the same RoPE
    local_sin: Tensor  # [T, H / 2] float32
    lse: Tensor  # [T, N] float32
    row_scales: Tensor  # [T] float32, of the codes in `normed`, then of those in `gated`; empty without FP8
    attended_codes: Tensor  # [T, N, H]: attention's result; empty without FP8
    qkv: Tensor  # [T, N + 2 K, H]
    query_codes: Tensor  # [T, N, H] for prefix attention in FP8, else empty
    attended: Tensor  # [T, N H + E]; in FP8 that of self-attention
    scored_queries: Tensor  # [T, N, H] of all scored tokens; codes of them take the first half of it
    scored_lse: Tensor  # [T, N] float32
    scored_positions: Tensor  # [T] int32
    gate_up: Tensor  # [T, 2 F]
    gated: Tensor  # [T, F + E], in FP8 its codes
    part_exponents: Tensor  # [F / 32, T] uint8, of the scales that a GEMM's codes in `gated` have; empty without FP8
    ones: Tensor  # [T] float32, as scales of `attended_codes`; empty without FP8

    def heads(self, config: ModelConfig) -> Tensor:
        """`attended` as [T, N, H]."""
        n, h = config.num_heads, config.head_size
        return self.attended[:, : n * h].view(-1, n, h)


class Workspace:
    """Memory for the activations of up to `num_tokens` tokens. All programs share it: they run one after the other."""

    def __init__(
        self,
        config: ModelConfig,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_scored: int,  # scored tokens with rows of their own
        is_fp8: bool = False,
        has_query_codes: bool = False,
        tails: tuple[int, int, int] = (0, 0, 0),  # columns behind `normed`, `attended` and `gated`
    ) -> None:
        self._config, self._dtype, self._is_fp8, self._tails = config, dtype, is_fp8, tails
        self._num_scored, self._has_query_codes = num_scored, has_query_codes
        self._memory = torch.empty(_Cut.total(self._shapes(num_tokens)), dtype=torch.uint8, device=device)
        self._ones = torch.ones(num_tokens if is_fp8 else 0, dtype=torch.float32, device=device)

    def _shapes(self, num_tokens: int) -> list[list[_Shape]]:
        """The buffers that always live, those that live until attention is done, and those that live after it."""
        config, t, wide = self._config, num_tokens, torch.float32
        d, n, k, h, f = config.model_size, config.num_heads, config.num_kv_heads, config.head_size, config.mlp_size
        local = ((t if config.local_rope is not None else 0, h // 2), wide)
        tables = [*[((t, h // 2), wide)] * 2, *[local] * 2]
        read, t8 = (FP8, t) if self._is_fp8 else (self._dtype, 0)  # what GEMMs read
        scored = [((self._num_scored, d), self._dtype), ((t, n * h), self._dtype)]
        coded = t if self._has_query_codes else 0
        scored_rows = [((t, n, h), self._dtype), ((t, n), wide), ((t,), torch.int32)]
        rows = [((t, d), self._dtype), ((t, d + self._tails[0]), read), ((t, d), self._dtype)]
        return [
            [*scored, *rows, *tables, ((t, n), wide), ((t8,), wide), ((t8, n, h), FP8)],
            [
                ((t, n + 2 * k, h), self._dtype),
                ((coded, n, h), FP8),
                ((t, n * h + self._tails[1]), self._dtype),
                *scored_rows,
            ],
            [
                ((t, 2 * f), self._dtype),
                ((t, f + self._tails[2]), read),
                ((f // ACTIVATION_PART, t8), torch.uint8),
            ],
        ]

    def buffers(self, num_tokens: int) -> Buffers:
        """They overwrite the buffers of every other call."""
        always, before, after = self._shapes(num_tokens)
        cut = _Cut(self._memory)
        tensors = [cut.next(*shape) for shape in always]
        start = cut.at
        tensors += [cut.next(*shape) for shape in before]
        cut.at = start
        tensors += [*(cut.next(*shape) for shape in after), self._ones[:num_tokens]]
        return Buffers(*tensors)


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
class FusedGemms:
    """GEMMs that do the next step too (`hopper_gemm.py`). `kernel_choice` has tried them."""

    gate_rows: int | None = None  # from so many rows on the MLP's first GEMM activates; None: never
    adds: bool = False  # where there are rows enough, those of O and down add to x


@dataclass(frozen=True)
class Trunk:
    """Weights, sizes and the KV cache; holds no state of a request."""

    config: ModelConfig
    weights: ModelWeights
    attention: PagedAttention
    kv_cache: KVCache
    cut: Callable[[int], Sequence[RowTile]]  # the rows of GEMMs
    rotary: Rotary
    local_rotary: Rotary  # of layers with a window
    ops: ElementwiseOps  # of layers with experts
    loras: LoraSlots | None = None
    fused_gemms: FusedGemms = FusedGemms()

    @property
    def is_fp8(self) -> bool:
        """Are the matrices of the layers in FP8?"""
        return self.weights.layers[0].fp8_scales is not None

    def __call__(self, spec: ProgramSpec, inputs: ForwardInputs[Tensor], buffers: Buffers) -> None:
        """Leaves the inputs of the last layer's end in `buffers`: `x` of all tokens and, where tokens are scored,
        `scored_x` of the first of these and `scored_attended` of all."""
        layers, eps = self.weights.layers, self.config.norm_eps
        if not spec.is_embedded:
            self.embed(inputs, buffers)
        self._make_rope_tables(inputs, buffers)
        weight = _given(layers[0].attention_norm)
        if self.is_fp8:
            norm_fp8(buffers.x, weight, eps, buffers.normed, buffers.row_scales)
        else:
            norm(buffers.x, weight, eps, buffers.normed)
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            lora = self._lora(spec, number, inputs)
            source = self._project(spec, number, layer, inputs, buffers, lora)
            if is_last and not spec.scores:
                return  # a prefill needs no more than the last layer's keys and values
            window = self.config.layer_windows[number]
            codes = buffers.attended_codes if self.is_fp8 and not is_last else None
            rows = Rows(buffers.qkv, buffers.heads(self.config), buffers.lse, inputs.positions, codes)
            self.attention.attend_self(rows, inputs.tiles, window)
            if source.has_fp8_queries:
                rows = rows._replace(queries=buffers.query_codes)
            if is_last:
                self._attend_scored(rows, source, inputs, buffers, window)
                return
            self.attention.attend_prefix(rows, source, inputs.tiles, window)
            is_added = self._finish(layer, buffers, lora)
            self._add_norm(layers[number + 1].attention_norm, buffers, is_added=is_added)

    def _attend_scored(
        self, rows: Rows, source: KeySource, inputs: ForwardInputs[Tensor], buffers: Buffers, window: int
    ) -> None:
        """The rest of the last layer's attention, of the scored tokens alone, and `scored_x`."""
        tokens = inputs.score_tokens
        attended = buffers.scored_attended.view_as(buffers.scored_queries)
        queries = buffers.scored_queries.view(rows.queries.dtype).view(-1)[: attended.numel()].view_as(attended)
        scored = Rows(queries, attended, buffers.scored_lse, buffers.scored_positions)
        self.attention.take_scored(rows, tokens, inputs.tiles, scored)
        self.attention.attend_prefix(scored, source, inputs.tiles, window, is_scored=True)
        torch.index_select(buffers.x, 0, tokens[: len(buffers.scored_x)], out=buffers.scored_x)

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
        self,
        spec: ProgramSpec,
        number: int,
        layer: LayerWeights,
        inputs: ForwardInputs[Tensor],
        buffers: Buffers,
        lora: AdaptedLayer | None = None,
    ) -> KeySource:
        """QKV projection, QK norm, RoPE, and the write to the KV cache; returns where prefixes are read."""
        n, k, cache = self.config.num_heads, self.config.num_kv_heads, self.kv_cache.layer(number)
        self._linear(layer, "qkv", buffers.normed, buffers.qkv.flatten(1), buffers, lora)
        slots = inputs.cache_slots if spec.reads == "cache" else None
        cos, sin = buffers.cos, buffers.sin
        if self.config.local_rope is not None and self.config.layer_windows[number]:
            cos, sin = buffers.local_cos, buffers.local_sin
        codes = buffers.query_codes if cache.has_fp8_queries else None
        qk_norm_rope_and_cache(buffers.qkv, layer.qk_norm, self.config.norm_eps, cos, sin, slots, cache, codes)
        return cache if spec.reads == "cache" else KeySource(buffers.qkv, buffers.qkv, n, n + k)

    def _finish(self, layer: LayerWeights, buffers: Buffers, lora: AdaptedLayer | None = None) -> bool:
        """Output projection, residual, MLP. Is the MLP's output added to x? Else it is in `delta`."""
        attended = buffers.attended_codes.flatten(1) if self.is_fp8 else buffers.attended
        is_added = self._multiply_or_add(layer, "o", attended, buffers, lora)
        if layer.post_attention_norm is not None:
            norm(buffers.delta, layer.post_attention_norm, self.config.norm_eps, buffers.delta)
        self._scale_delta(buffers)
        self._add_norm(layer.mlp_norm, buffers, is_added=is_added)
        if layer.experts is not None:
            buffers.delta.copy_(self.ops.run_experts(layer.experts, buffers.normed, self.config))
            is_added = False
        else:
            self._run_gate(layer, buffers, lora)
            is_added = self._multiply_or_add(layer, "down", buffers.gated, buffers, lora)
        if layer.post_mlp_norm is not None:
            norm(buffers.delta, layer.post_mlp_norm, self.config.norm_eps, buffers.delta)
        self._scale_delta(buffers)
        return is_added

    def _run_gate(self, layer: LayerWeights, buffers: Buffers, lora: AdaptedLayer | None) -> None:
        """From `normed` into `gated`."""
        activation, gate_rows = self.config.activation, self.fused_gemms.gate_rows
        if gate_rows is not None and len(buffers.normed) >= gate_rows:
            from prefixwise.backends.torch.cuda.hopper_gemm import gated_gemm

            scales = self._scales(layer, "gate_up", buffers)
            if scales is None:
                gated_gemm(buffers.normed, _given(layer.gate_up), activation, buffers.gated)
                return
            gated_gemm(buffers.normed, _given(layer.gate_up), activation, buffers.gated, scales, buffers.part_exponents)
            rescale(buffers.gated, buffers.part_exponents, buffers.row_scales)
            return
        self._linear(layer, "gate_up", buffers.normed, buffers.gate_up, buffers, lora)
        if self.is_fp8:
            gate_fp8(buffers.gate_up, activation, buffers.gated, buffers.row_scales)
        else:
            gate(buffers.gate_up, activation, buffers.gated)

    def _multiply_or_add(
        self, layer: LayerWeights, matrix: Matrix, x: Tensor, buffers: Buffers, lora: AdaptedLayer | None
    ) -> bool:
        """x times a matrix of the layer, into `delta` or added to `x` of the buffers. Is it added?"""
        if self.fused_gemms.adds:
            from prefixwise.backends.torch.cuda.hopper_gemm import is_residual_gemm_fast, residual_gemm

            if is_residual_gemm_fast(buffers.x):
                residual_gemm(x, _given(getattr(layer, matrix)), buffers.x, self._scales(layer, matrix, buffers))
                return True
        self._linear(layer, matrix, x, buffers.delta, buffers, lora)
        return False

    def _add_norm(self, weight: Tensor | None, buffers: Buffers, *, is_added: bool) -> None:
        """`x` becomes x + delta, unless a GEMM has added it, and `normed` its norm."""
        x, delta, eps = buffers.x, buffers.delta, self.config.norm_eps
        if is_added and self.is_fp8:
            norm_fp8(x, _given(weight), eps, buffers.normed, buffers.row_scales)
        elif is_added:
            norm(x, _given(weight), eps, buffers.normed)
        elif self.is_fp8:
            add_norm_fp8(x, delta, _given(weight), eps, buffers.normed, buffers.row_scales)
        else:
            add_norm(x, delta, _given(weight), eps, buffers.normed)

    def _linear(
        self,
        layer: LayerWeights,
        matrix: Matrix,
        x: Tensor,
        out: Tensor,
        buffers: Buffers,
        lora: AdaptedLayer | None = None,
    ) -> None:
        """x [T, in], in FP8 codes whose scales are in `buffers`, times a matrix of the layer, into `out`; and what
        adapters add. Theirs reads x first: it was just written, and is still in the GPU's cache."""
        wide = None if lora is None else lora.widen(matrix, x)
        inner = None if lora is None or wide is not None else lora.shrink(matrix, x)
        weight = _given(getattr(layer, matrix)) if wide is None else wide
        scales = self._scales(layer, matrix, buffers)
        bias = layer.qkv_bias if matrix == "qkv" else None
        linear(x[:, : weight.shape[1]], weight, bias, out, self.cut(len(x)), scales)
        if lora is not None and inner is not None:
            lora.expand(matrix, inner, out)

    def _scales(self, layer: LayerWeights, matrix: Matrix, buffers: Buffers) -> tuple[Tensor, Tensor] | None:
        """In FP8 those of the codes that a matrix is multiplied by, and its own."""
        if layer.fp8_scales is None:
            return None
        return buffers.ones if matrix == "o" else buffers.row_scales, getattr(layer.fp8_scales, matrix)

    def _lora(self, spec: ProgramSpec, number: int, inputs: ForwardInputs[Tensor]) -> AdaptedLayer | None:
        """Of a layer; None: no row has an adapter."""
        if self.loras is None or not spec.has_lora:
            return None
        wide = self.loras.wide[number] if self.loras.wide else {}
        return AdaptedLayer(inputs.lora_slots, self.loras.layers[number], wide)

    def _scale_delta(self, buffers: Buffers) -> None:
        if self.config.residual_scale != 1.0:
            buffers.delta.mul_(self.config.residual_scale)


def _given(weight: Tensor | None) -> Tensor:
    assert weight is not None, "models without these parts are not run here (`kernel_choice.has_paged_attention`)"
    return weight
