"""Attention over segments on CUDA in half precision: two variable-length flash attentions and a merge.

One call takes every segment's own tokens (causal), one takes every query over its prefix (no mask, one "sequence" per
prefix and length). The kernel walks each sequence in tiles of its own, from the sequence's start, and never splits the
keys of one query between blocks, so a row's bits do not depend on its neighbours. Queries, keys and values are read
where the projection left them; outputs stay in half precision, and the merge is one of the `RowOps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from itemwise.backends.base import ForwardBatch, Layout
from itemwise.backends.torch.attention import Attention, KeysValues, batch_prefix_starts, keys_of
from itemwise.backends.torch.dense_mask import DenseMask
from itemwise.backends.torch.row_ops import PLAIN, FlashPart, RowOps, pad_with_zeros
from itemwise.backends.torch.softmax import NEG_INF
from itemwise.backends.torch.tiles import FullRange, cut_diagonals, cut_full_ranges, prefix_ranges
from itemwise.backends.torch.upload import upload
from itemwise.contract.ragged import Int64Array

# With one query row per sequence the kernel would take another path (heads folded, keys split), with other bits.
_LEAST_MAX_LEN = 128


class VarlenAttention(Attention):
    """For bfloat16 and float16 on a GPU; head sizes up to 256 that are multiples of 8."""

    def __init__(self, batch: ForwardBatch, device: torch.device, row_ops: RowOps = PLAIN) -> None:
        self._row_ops = row_ops
        self._num_tokens = batch.num_tokens
        self._own = Lengths([int(n) for n in batch.segment_starts], device)
        self._ranges = prefix_ranges(batch)
        self._prefix_starts = batch_prefix_starts(batch)
        self._readers = _Readers(self._ranges, batch.num_tokens, device) if self._ranges else None
        self._dense: DenseMask | None = None
        if batch.layout is Layout.PACKED and batch.mask == "dense":
            self._dense = DenseMask(batch, cut_diagonals(batch), cut_full_ranges(batch), device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prefixes: Sequence[KeysValues | None]) -> Tensor:
        real, readers = slice(0, self._num_tokens), self._readers
        own = flash(q[real], k[real], v[real], self._own, self._own, causal=True)
        part: FlashPart | None = None
        if readers is None:
            out = pad_with_zeros(own[0], len(q))
        else:
            keys, values = self._gather_prefixes(k, v, prefixes)
            part = flash(q[readers.tokens], keys, values, readers.query_lens, readers.key_lens, causal=False)
            out = self._row_ops.merge(own, part, readers.part_rows, len(q))
        if self._dense is None:
            return out
        total = out.float(), self._merged_lse(own, part, len(q))
        self._dense.attend_rest(q, k, v, total)
        return total[0]

    def _merged_lse(self, own: FlashPart, part: FlashPart | None, num_rows: int) -> Tensor:
        """[num_rows, N]: what the dense mask goes on from."""
        lse = F.pad(own[1].T, (0, 0, 0, num_rows - self._num_tokens), value=NEG_INF)
        if self._readers is not None and part is not None:
            tokens = self._readers.tokens
            lse[tokens] = torch.logaddexp(lse[tokens], part[1].T)
        return lse

    def _gather_prefixes(self, k: Tensor, v: Tensor, prefixes: Sequence[KeysValues | None]) -> KeysValues:
        """The keys and values of all ranges, one after the other; a single one is a view."""
        pairs = [keys_of(part, self._prefix_starts, k, v, prefixes) for part in self._ranges]
        if len(pairs) == 1:
            return pairs[0]
        return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


class _Readers:
    """The tokens that read a prefix, in the order in which the ranges name them."""

    def __init__(self, ranges: Sequence[FullRange], num_tokens: int, device: torch.device) -> None:
        queries = np.concatenate([part.queries for part in ranges])
        part_rows = np.full(num_tokens, -1, np.int32)
        part_rows[queries] = np.arange(len(queries))
        self.tokens = _token_index(queries, device)
        self.part_rows = upload(part_rows, device)  # [tokens]: each one's place among the readers, or -1
        self.query_lens = Lengths(_offsets([len(part.queries) for part in ranges]), device)
        self.key_lens = Lengths(_offsets([part.stop for part in ranges]), device)


def _token_index(tokens: Int64Array, device: torch.device) -> Tensor | slice:
    """All these tokens, as a slice where they follow each other, so that nothing is copied to take them."""
    if np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens))):
        return slice(int(tokens[0]), int(tokens[0]) + len(tokens))
    return upload(tokens, device)


class Lengths:
    """Offsets of sequences in a flat run of tokens, as the kernel wants them."""

    def __init__(self, offsets: Sequence[int], device: torch.device) -> None:
        self.offsets = upload(np.array(offsets, np.int32), device)
        longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
        self.max_len = max(longest, _LEAST_MAX_LEN)


def _offsets(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def flash(q: Tensor, k: Tensor, v: Tensor, q_lens: Lengths, k_lens: Lengths, *, causal: bool) -> FlashPart:
    """q [T, N, H], k and v [C, K, H]; slices of wider rows too, since the kernel needs only whole heads."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_lens.offsets, k_lens.offsets, q_lens.max_len, k_lens.max_len, 0.0, causal, False
    )
    return out, lse
