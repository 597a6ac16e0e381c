"""Launching the attention kernels: which tiles a model gets, and one call per layer.

The kernel for Hopper reads keys and values in the dtype of the model alone. A KV cache in FP8 is read by the one for
all GPUs; prefixes in the batch, which are never in FP8, by either.

Tiles, warps and stages decide how fast a kernel is. `PrefixTuning` and `SelfAttentionTuning` hold them as data, so that
a sweep can choose. A model has one of each for all its forwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prefixwise.backends.torch.cuda.attention_kernels import prefix_kernel, self_attention_kernel
from prefixwise.backends.torch.cuda.elementwise_kernels import launch
from prefixwise.backends.torch.cuda.inputs import TileArrays
from prefixwise.backends.torch.cuda.kv_cache import KeySource
from prefixwise.forward.tiles import KEY_TILE, NARROW, PREFIX, WIDE, TileSizes
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
    """Tuning of the narrow tiles of self-attention, or of the wide ones."""

    width: int  # tokens, at most
    num_warps: int
    num_stages: int = 3  # tiles, or tiles of keys, in flight
    programs_per_sm: int = 8


HOPPER_TUNING = PrefixTuning(is_hopper=True, num_warps=4)


def prefix_tunings(head_size: int, device: torch.device) -> list[PrefixTuning]:
    """Fastest first. Queries, output, and the keys and values in flight have to fit a multiprocessor."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    for_hopper = [HOPPER_TUNING] if is_hopper and 32 < head_size <= 128 and head_size % 8 == 0 else []
    return [*for_hopper, PrefixTuning(num_keys=32) if head_size > 128 else PrefixTuning()]


def self_attention_tunings(head_size: int) -> tuple[SelfAttentionTuning, SelfAttentionTuning]:
    """For narrow tiles, and for wide ones, whose keys and values in flight have to fit a multiprocessor."""
    if head_size > 128:
        return SelfAttentionTuning(32, num_warps=8), SelfAttentionTuning(32, num_warps=8)
    return SelfAttentionTuning(32, num_warps=4), SelfAttentionTuning(32, num_warps=4, num_stages=1, programs_per_sm=16)


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
        self_attention: tuple[SelfAttentionTuning, SelfAttentionTuning] | None = None,
        scale: float | None = None,  # of the scores; None: 1 / sqrt(H)
        softcap: float = 0.0,  # of the scores; 0: they are not capped
    ) -> None:
        self._prefix = prefix or prefix_tunings(head_size, device)[0]
        self._fp8_prefix = self._prefix if not self._prefix.is_hopper else prefix_tunings(head_size, device)[-1]
        assert self._fp8_prefix.num_rows == self._prefix.num_rows, "both have the same tiles"
        self._self_attention = self_attention or self_attention_tunings(head_size)
        self._device = device
        self._num_kv_heads, self._group, self._head_size = num_kv_heads, num_heads // num_kv_heads, head_size
        self._padded_group = triton.next_power_of_2(self._group)
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

    def probe(self, dtype: torch.dtype) -> None:
        """Run prefix attention over the batch without a tile: a kernel that cannot be compiled fails here."""
        k, h, device = self._num_kv_heads, self._head_size, self._device
        num_heads = k * self._group
        qkv = torch.zeros(KEY_TILE, num_heads + 2 * k, h, dtype=dtype, device=device)
        source = KeySource(qkv, qkv, num_heads, num_heads + k)
        no_tiles = torch.zeros(16, dtype=torch.int32, device=device)
        lse = torch.zeros(KEY_TILE, num_heads, device=device)
        self.attend_prefix(
            qkv, source, TileArrays(*[no_tiles] * len(TileArrays._fields)), qkv[:, :num_heads].clone(), lse
        )
        lse.cpu()  # waits for it

    @property
    def tile_sizes(self) -> TileSizes:
        max_tokens = max(MIN_SELF_TOKENS, MAX_SELF_ROWS // self._padded_group)
        narrow, wide = (min(tuning.width, max_tokens) for tuning in self._self_attention)
        prefix = max(1, self._prefix.num_rows // self._padded_group)
        return TileSizes(narrow, wide, prefix, has_token_arrays=False)

    def __call__(
        self,
        qkv: Tensor,
        source: KeySource,
        tiles: TileArrays[Tensor],
        out: Tensor,
        lse: Tensor,
        positions: Tensor | None = None,  # [T] int32; needed with a window
        window: int = 0,  # of the layer; 0: tokens see all before them
    ) -> None:
        """Self-attention and prefix attention: qkv [T, N + 2 K, H] after RoPE to out [T, N, H], whose tokens may lie
        apart. `lse` is scratch.

        Padding is in no tile, and its rows of `out` are not written.
        """
        self.attend_self(NARROW, qkv, tiles, out, lse, window)
        self.attend_self(WIDE, qkv, tiles, out, lse, window)
        self.attend_prefix(qkv, source, tiles, out, lse, positions, window)

    def attend_self(
        self, kind: int, qkv: Tensor, tiles: TileArrays[Tensor], out: Tensor, lse: Tensor, window: int = 0
    ) -> None:
        """Self-attention of the narrow tiles, or of the wide ones: writes `out` and `lse` of their tokens."""
        is_wide, sizes, tuning = kind == WIDE, self.tile_sizes, self._self_attention[kind]
        assert out.stride()[1:] == (self._head_size, 1), "heads lie one behind the other"
        arrays = (tiles.narrow_start, tiles.narrow_len, tiles.narrow_start)
        if is_wide:
            arrays = (tiles.wide_start, tiles.wide_len, tiles.wide_segment)
        launch(
            self_attention_kernel,
            (self._num_programs(len(arrays[0]), tuning.programs_per_sm),),
            tiles.counts,
            *arrays,
            qkv,
            out,
            lse,
            softcap=self._softcap,
            window=window,
            kind=kind,
            is_wide=is_wide,
            width=sizes.wide if is_wide else sizes.narrow,
            out_stride=out.stride(0),
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **self._sizes,
        )

    def attend_prefix(
        self,
        qkv: Tensor,
        source: KeySource,
        tiles: TileArrays[Tensor],
        out: Tensor,
        lse: Tensor,
        positions: Tensor | None = None,
        window: int = 0,
    ) -> None:
        """Continues the softmax of self-attention for the tokens that read a prefix."""
        tuning = self._prefix if source.key_scales is None else self._fp8_prefix
        kernel, descriptor = prefix_kernel, TensorDescriptor.from_tensor
        sizes: dict[str, Any] = {"num_keys": tuning.num_keys, "num_stages": tuning.num_stages}
        sizes |= {"softcap": self._softcap, "window": window}
        arrays: list[Any] = [out, lse, tiles.counts if positions is None else positions]
        queries: tuple[Any, ...] = (qkv,)
        scales: tuple[Any, ...] = (source.key_scales, source.value_scales, source.num_slots)
        assert positions is not None or not window, "a window cuts by positions"
        if tuning.is_hopper:
            from prefixwise.backends.torch.cuda.hopper import describe, hopper_prefix_kernel, row_box

            assert not window, "the kernel for Hopper has no windows"
            kernel, descriptor, sizes = hopper_prefix_kernel, describe, {"num_buffers": tuning.num_stages}
            rows = row_box(self.tile_sizes.prefix, self._padded_group, self._sizes["padded_head_size"])
            queries = (describe(qkv, rows), describe(out, rows))
            arrays.pop()
            scales = ()
        box = [tuning.num_keys, self._sizes["padded_head_size"]]
        keys, values = (descriptor(each.flatten(1), box) for each in (source.keys, source.values))
        launch(
            kernel,
            (self._num_programs(len(tiles.prefix_start), tuning.programs_per_sm),),
            tiles.counts,
            *(tiles.prefix_start, tiles.prefix_len, tiles.prefix_read, tiles.prefix_list, tiles.key_tile_addresses),
            *(*queries, keys, values, *arrays, *scales),
            first_key_head=source.first_key_head,
            first_value_head=source.first_value_head,
            kind=PREFIX,
            width=self.tile_sizes.prefix,
            page_size=KEY_TILE,
            out_stride=out.stride(0),
            num_warps=tuning.num_warps,
            **sizes,
            **self._sizes,
        )

    def _num_programs(self, max_tiles: int, per_sm: int) -> int:
        """Enough for all multiprocessors, and at most one per tile and KV head."""
        return max(1, min(per_sm * self._num_multiprocessors, max_tiles * self._num_kv_heads))
