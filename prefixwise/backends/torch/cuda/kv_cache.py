"""The paged KV cache: keys and values of prefixes in every layer, in pages of KEY_TILE tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


class KVCache:
    """Two arrays for all prefixes, so that a program depends neither on their number nor on their lengths.

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
    ) -> None:
        shape = (num_layers, num_pages * KEY_TILE, num_kv_heads, head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
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

    def layer(self, number: int) -> KeySource:
        return KeySource(self.keys[number], self.values[number])

    def contents(self, block: KVBlock) -> Tensor:
        """[layers, 2, tokens, K, H], a copy."""
        first = self.address(block)
        rows = slice(first, first + block.num_tokens)
        return torch.stack([self.keys[:, rows], self.values[:, rows]], 1)
