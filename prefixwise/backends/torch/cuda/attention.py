"""Launching the attention kernels, and which tiles a model gets.

The kernel for Hopper reads values in the dtype of the model alone, and keys without scales: in FP8 with queries in FP8.
A KV cache whose codes have scales is read by the one for all GPUs; prefixes in the batch, which are never in FP8, by
either.

Tiles, warps and stages decide how fast a kernel is. `PrefixTuning` and `SelfAttentionTuning` hold them as data, so that
a sweep can choose. A model has one of each for all its forwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prefixwise.backends.torch.cuda.attention_kernels import prefix_kernel, self_attention_kernel, take_scored_kernel
from prefixwise.backends.torch.cuda.elementwise_kernels import launch
from prefixwise.backends.torch.cuda.inputs import SCORED, SCORED_ROWS, TileArrays
from prefixwise.backends.torch.cuda.kv_cache import KeySource
from prefixwise.backends.torch.fp8 import FP8
from prefixwise.forward.tiles import KEY_TILE, PREFIX, WIDE, TileSizes
from prefixwise.models.config import ModelConfig

LOG2_E = math.log2(math.e)
MAX_SELF_ROWS = 128  # tokens x query heads of one KV head, unless that gives fewer than MIN_SELF_TOKENS
MIN_SELF_TOKENS = 16  # of a tile of self-attention: as keys they are a side of a matrix product
CPU_PROGRAMS = 2  # in Triton's interpreter
HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True)
class PrefixTuning:
    """Tuning of prefix attention."""

    is_hopper: bool = False  # the kernel for Hopper, or the one for all GPUs
    num_rows: int = 128  # tokens x query heads of one KV head
    num_keys: int = 128  # of one load; divides KEY_TILE
    num_stages: int = 2  # loads in flight
    num_warps: int = 8
    programs_per_sm: int = 1


@dataclass(frozen=True)
class SelfAttentionTuning:
    """Tuning of self-attention."""

    width: int = 32  # tokens of a tile, at most
    num_warps: int = 4
    num_stages: int = 1  # tiles of keys in flight
    programs_per_sm: int = 16
    max_registers: int | None = None  # of a thread; None: as many as it takes


HOPPER_TUNING = PrefixTuning(is_hopper=True, num_warps=4)


def prefix_tunings(head_size: int, device: torch.device) -> list[PrefixTuning]:
    """Fastest first. Queries, output, and the keys and values in flight have to fit a multiprocessor."""
    for_hopper = [HOPPER_TUNING] if _is_hopper(device) and 32 < head_size <= 128 and head_size % 8 == 0 else []
    return [*for_hopper, PrefixTuning(num_keys=32) if head_size > 128 else PrefixTuning()]


def self_attention_tuning(head_size: int, padded_group: int, device: torch.device) -> SelfAttentionTuning:
    """Keys and values in flight have to fit a multiprocessor. On Hopper four programs of 64 rows run on one, where the
    kernel would like registers for three; with more rows it would spill many."""
    if head_size > 128:
        return SelfAttentionTuning(num_warps=8, num_stages=3, programs_per_sm=8)
    has_few_rows = SelfAttentionTuning.width * padded_group <= 64
    return SelfAttentionTuning(max_registers=128 if has_few_rows and _is_hopper(device) else None)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


class Rows(NamedTuple):
    """What attention reads and writes of tokens. Padding is in no tile."""

    queries: Tensor  # [T, N or more, H] after RoPE: QKV rows, or queries alone; in FP8 where the prefix's keys are
    out: Tensor  # [T, N, H]: tokens may lie apart
    lse: Tensor  # [T, N] float32: between self-attention and prefix attention
    positions: Tensor  # [T] int32: read where a layer has a window
    codes: Tensor | None = None  # [T, N, H]: the result in FP8; `out` then keeps that of self-attention


class PagedAttention:
    """Sizes and tuning of a model; holds no state of a request."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device,
        prefix: PrefixTuning | None = None,
        self_attention: SelfAttentionTuning | None = None,
        scale: float | None = None,  # of the scores; None: 1 / sqrt(H)
        softcap: float = 0.0,  # of the scores; 0: they are not capped
    ) -> None:
        self._prefix = prefix or prefix_tunings(head_size, device)[0]
        self._scaled_prefix = self._prefix if not self._prefix.is_hopper else prefix_tunings(head_size, device)[-1]
        assert self._scaled_prefix.num_rows == self._prefix.num_rows, "both have the same tiles"
        self._device = device
        self._num_kv_heads, self._group, self._head_size = num_kv_heads, num_heads // num_kv_heads, head_size
        self._padded_group = triton.next_power_of_2(self._group)
        self._self_attention = self_attention or self_attention_tuning(head_size, self._padded_group, device)
        self._num_multiprocessors = CPU_PROGRAMS
        if device.type == "cuda":
            self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._sizes: dict[str, Any] = {
            "scale": LOG2_E / math.sqrt(head_size) if scale is None else LOG2_E * scale,
            "num_kv_heads": num_kv_heads,
            "group": self._group,
            "padded_group": self._padded_group,
            "head_size": head_size,
            "padded_head_size": max(16, triton.next_power_of_2(head_size)),
        }
        self._softcap = LOG2_E * softcap
        assert not (self._prefix.is_hopper and (scale or softcap)), "the kernel for Hopper computes plain scores"

    @classmethod
    def for_model(cls, config: ModelConfig, device: torch.device, prefix: PrefixTuning | None = None) -> PagedAttention:
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            device=device,
            prefix=prefix,
            scale=config.score_scale,
            softcap=config.score_softcap,
        )

    def probe(self, dtype: torch.dtype, *, has_fp8_queries: bool = False, has_fp8_result: bool = False) -> None:
        """Run prefix attention without a tile: a kernel that cannot be compiled fails here. The last layer's result is
        never in FP8."""
        k, h, device = self._num_kv_heads, self._head_size, self._device
        num_heads = k * self._group
        qkv = torch.zeros(KEY_TILE, num_heads + 2 * k, h, dtype=dtype, device=device)
        source = KeySource(qkv, qkv, num_heads, num_heads + k)
        no_tiles = torch.zeros(16, dtype=torch.int32, device=device)
        lse, positions = torch.zeros(KEY_TILE, num_heads, device=device), no_tiles
        out = qkv[:, :num_heads].clone()
        tiles = TileArrays(*[no_tiles] * len(TileArrays._fields))
        for codes in (None, out.to(FP8)) if has_fp8_result else (None,):
            rows = Rows(qkv, out, lse, positions, codes)
            self.attend_prefix(rows, source, tiles)
            if has_fp8_queries:
                keys = qkv[:, num_heads : num_heads + k].to(FP8)
                self.attend_prefix(rows._replace(queries=out.to(FP8)), KeySource(keys, keys.to(dtype)), tiles)
        lse.cpu()  # waits for them

    @property
    def tile_sizes(self) -> TileSizes:
        max_tokens = max(MIN_SELF_TOKENS, MAX_SELF_ROWS // self._padded_group)
        prefix = max(1, self._prefix.num_rows // self._padded_group)
        return TileSizes(0, min(self._self_attention.width, max_tokens), prefix, has_token_arrays=False)

    def attend_self(self, rows: Rows, tiles: TileArrays[Tensor], window: int = 0) -> None:
        """Self-attention of all tokens but padding: writes all of `rows` but the queries, which are rows of QKV."""
        tuning, out = self._self_attention, rows.out
        assert out.stride()[1:] == (self._head_size, 1), "heads lie one behind the other"
        assert rows.codes is None or rows.codes.is_contiguous()
        launch(
            self_attention_kernel,
            (self._num_programs(len(tiles.wide_start), tuning.programs_per_sm),),
            tiles.counts,
            *(tiles.wide_start, tiles.wide_len, tiles.wide_segment, rows.queries, out, rows.codes, rows.lse),
            softcap=self._softcap,
            window=window,
            kind=WIDE,
            width=self.tile_sizes.wide,
            out_stride=out.stride(0),
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **({} if tuning.max_registers is None else {"maxnreg": tuning.max_registers}),
            **self._sizes,
        )

    def take_scored(self, rows: Rows, tokens: Tensor, tiles: TileArrays[Tensor], scored: Rows) -> None:
        """Rows of the scored `tokens` after self-attention, one behind the other."""
        _, num_heads, head_size = rows.out.shape
        given = *rows[:4], *scored[:4]
        assert all(each.is_contiguous() for each in scored[:4])
        assert rows.codes is None and scored.codes is None, "the last layer's result is not in FP8"
        launch(
            take_scored_kernel,
            (4 * self._num_multiprocessors,),
            tiles.counts,
            *(tokens, *given),
            num_kind=SCORED_ROWS,
            row_size=rows.queries.stride(0),
            out_stride=rows.out.stride(0),
            num_heads=num_heads,
            size=num_heads * head_size,
            padded_heads=triton.next_power_of_2(num_heads),
            padded_size=triton.next_power_of_2(num_heads * head_size),
        )

    def attend_prefix(
        self, rows: Rows, source: KeySource, tiles: TileArrays[Tensor], window: int = 0, *, is_scored: bool = False
    ) -> None:
        """Continues the softmax of self-attention for the tokens that read a prefix. `is_scored`: `rows` are those of
        the scored tokens."""
        tuning = self._prefix if source.key_scales is None else self._scaled_prefix
        out, starts = rows.out, tiles.prefix_start
        result = out if rows.codes is None else rows.codes
        arrays = (starts, tiles.prefix_len, tiles.prefix_read, tiles.prefix_list)
        if is_scored:
            starts = tiles.scored_start
            arrays = (starts, tiles.scored_len, tiles.scored_read, tiles.scored_list)
        kernel, descriptor = prefix_kernel, TensorDescriptor.from_tensor
        sizes: dict[str, Any] = {"num_keys": tuning.num_keys, "num_stages": tuning.num_stages}
        sizes |= {"softcap": self._softcap, "window": window, "query_stride": rows.queries.stride(0)}
        sizes["out_stride"] = out.stride(0)
        queries: tuple[Any, ...] = (rows.queries,)
        results: tuple[Any, ...] = (out, result)
        rest: tuple[Any, ...] = (rows.positions, source.key_scales, source.value_scales, source.num_slots)
        if tuning.is_hopper:
            from prefixwise.backends.torch.cuda.hopper import describe, hopper_prefix_kernel, row_box

            assert not window, "the kernel for Hopper has no windows"
            kernel, descriptor, sizes, rest = hopper_prefix_kernel, describe, {"num_buffers": tuning.num_stages}, ()
            box = row_box(self.tile_sizes.prefix, self._padded_group, self._sizes["padded_head_size"])
            queries, results = (describe(rows.queries, box), describe(out, box)), (result,)
        key_box = [tuning.num_keys, self._sizes["padded_head_size"]]
        keys, values = (descriptor(each.flatten(1), key_box) for each in (source.keys, source.values))
        launch(
            kernel,
            (self._num_programs(len(starts), tuning.programs_per_sm),),
            tiles.counts,
            *(*arrays, tiles.key_tile_addresses, *queries, keys, values, *results, rows.lse, *rest),
            first_key_head=source.first_key_head,
            first_value_head=source.first_value_head,
            kind=SCORED if is_scored else PREFIX,
            width=self.tile_sizes.prefix,
            page_size=KEY_TILE,
            result_stride=result.stride(0),
            num_warps=tuning.num_warps,
            **sizes,
            **self._sizes,
        )

    def _num_programs(self, max_tiles: int, per_sm: int) -> int:
        """Enough for all multiprocessors, and at most one per tile and KV head."""
        return max(1, min(per_sm * self._num_multiprocessors, max_tiles * self._num_kv_heads))
