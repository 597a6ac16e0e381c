"""The paged KV cache: keys and values of prefixes in every layer, in pages of KEY_TILE tokens.

In FP8 it holds codes, and the exponents of their scales (`quantise_heads` in `fp8.py`): one for the key and one for the
value of each token and KV head. A head's exponents lie one behind the other, as attention reads them. For prefix
attention in FP8 keys are in FP8 without scales, and values are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixwise.backends.torch.fp8 import FP8, KVFormat, dequantise_heads
from prefixwise.forward.batch import KVBlock
from prefixwise.forward.kv_pages import PageLease, Pages
from prefixwise.forward.tiles import KEY_TILE


@dataclass(frozen=True, eq=False)
class PagedBlock(KVBlock):
    """A KV block in a page of the KV cache."""

    lease: PageLease

    def release(self) -> None:
        self.lease.release()


@dataclass(frozen=True)
class KeySource:
    """Where attention reads the keys and values of prefixes: a layer of the KV cache, or the QKV rows of the batch."""

    keys: Tensor  # [A, heads, H]
    values: Tensor  # [A, heads, H]
    first_key_head: int = 0
    first_value_head: int = 0
    key_scales: Tensor | None = None  # [K, A] uint8, exponents; None: keys and values have no scales
    value_scales: Tensor | None = None

    @property
    def num_slots(self) -> int | None:
        """A, which the kernels need to find a head's exponents; None where there are none."""
        return None if self.key_scales is None else self.key_scales.shape[1]

    @property
    def has_fp8_queries(self) -> bool:
        """Are its keys for prefix attention in FP8, which reads the queries in FP8, too?"""
        return self.keys.dtype == FP8 and self.key_scales is None


class KVCache:
    """One array of keys and one of values for all prefixes, so that a program depends neither on their number nor on
    their lengths.

    Pages that were never written, and the tokens after the end of a short block, may hold any bits.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_format: KVFormat = "auto",
    ) -> None:
        shape = (num_layers, num_pages * KEY_TILE, num_kv_heads, head_size)
        self._dtype = dtype  # of the model
        self.keys = torch.empty(shape, dtype=dtype if kv_format == "auto" else FP8, device=device)
        self.values = torch.empty(shape, dtype=FP8 if kv_format == "fp8" else dtype, device=device)
        self._scales: Tensor | None = None  # [2, layers, K, A]: of keys, of values
        if kv_format == "fp8":
            scales_shape = (2, num_layers, num_kv_heads, num_pages * KEY_TILE)
            self._scales = torch.empty(scales_shape, dtype=torch.uint8, device=device)
        self._pages = Pages(num_pages)

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    def take(self, lens: Sequence[int]) -> tuple[PagedBlock, ...]:
        """Reserve a page for each block of so many tokens; all of them or none."""
        leases = self._pages.take(lens)
        return tuple(PagedBlock(length, lease) for length, lease in zip(lens, leases, strict=True))

    def address(self, block: KVBlock) -> int:
        """The block's first row in each layer. Raises BackendError where its page was released."""
        assert isinstance(block, PagedBlock), "a block of another backend"
        return block.lease.address

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.keys, self.values, self._scales) if each is not None)

    def layer(self, number: int) -> KeySource:
        keys, values = self.keys[number], self.values[number]
        if self._scales is None:
            return KeySource(keys, values)
        return KeySource(keys, values, key_scales=self._scales[0, number], value_scales=self._scales[1, number])

    def contents(self, block: KVBlock) -> Tensor:
        """[layers, 2, tokens, K, H] in the dtype of the model, a copy."""
        first = self.address(block)
        rows = slice(first, first + block.num_tokens)
        if self._scales is None:
            return torch.stack([self.keys[:, rows].to(self._dtype), self.values[:, rows]], 1)
        stored = torch.stack([self.keys[:, rows], self.values[:, rows]], 1)
        return dequantise_heads(stored, self._scales[..., rows].permute(1, 0, 3, 2), self._dtype)
