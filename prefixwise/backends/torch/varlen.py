"""Attention over segments on CUDA in half precision: two variable-length flash attentions and a merge.

One call takes every segment's own tokens (causal), one takes every query over its prefix (no mask, one "sequence" per
prefix and length). The kernel walks each sequence in tiles of its own, from the sequence's start, and never splits the
keys of one query between blocks, so a row's bits do not depend on its neighbours. Queries, keys and values are read
where the projection left them; outputs stay in half precision, and the merge is one of the `ElementwiseOps`.

A prefix whose blocks are in the batch is read at as many lengths as it has blocks. Either every range is copied to a
place of its own, or all are read in one array that holds each prefix once (READS_IN_PLACE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.attention import Attention
from prefixwise.backends.torch.dense_mask import DenseMask
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps, FlashPart, pad_with_zeros
from prefixwise.backends.torch.prefixes import KeysValues, OverlappingRanges, PrefixPlaces, join_pieces, read_pieces
from prefixwise.backends.torch.softmax import NEG_INF
from prefixwise.backends.torch.tiles import FullRange, cut_diagonals, cut_full_ranges, prefix_ranges
from prefixwise.backends.torch.transfer import token_index, upload
from prefixwise.forward.batch import ForwardBatch, Layout

# With one query row per sequence the kernel would take another path (heads folded, keys split), with other bits.
_LEAST_MAX_LEN = 128

READS_IN_PLACE = True  # may ranges of keys overlap? Else each is copied


class VarlenAttention(Attention):
    """For bfloat16 and float16 on a GPU; head sizes up to 256 that are multiples of 8."""

    def __init__(
        self,
        batch: ForwardBatch,
        device: torch.device,
        elementwise_ops: ElementwiseOps = PLAIN,
        *,
        reads_in_place: bool = READS_IN_PLACE,
    ) -> None:
        self._row_ops = elementwise_ops
        self._num_tokens = batch.num_tokens
        self._own = Lengths.consecutive([int(n) for n in batch.segment_starts], device)
        parts = prefix_ranges(batch)
        self._readers = _Readers(batch, parts, device, reads_in_place=reads_in_place) if parts else None
        self._dense: DenseMask | None = None
        if batch.layout is Layout.PACKED and batch.mask == "dense":
            self._dense = DenseMask(
                batch, cut_diagonals(batch, padded=True, filled=True), cut_full_ranges(batch), device
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kept: KeysValues | None) -> Tensor:
        real, readers = slice(0, self._num_tokens), self._readers
        own = flash(q[real], k[real], v[real], self._own, self._own, causal=True)
        part: FlashPart | None = None
        if readers is None:
            out = pad_with_zeros(own[0], len(q))
        else:
            keys, values = read_pieces(readers.pieces, k, v, kept)
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


class _Readers:
    """The tokens that read a prefix, in the order in which the ranges name them, and where the ranges are."""

    def __init__(
        self, batch: ForwardBatch, parts: Sequence[FullRange], device: torch.device, *, reads_in_place: bool
    ) -> None:
        queries = np.concatenate([part.queries for part in parts])
        part_rows = np.full(batch.num_tokens, -1, np.int32)
        part_rows[queries] = np.arange(len(queries))
        self.tokens = token_index(queries, device)
        self.part_rows = upload(part_rows, device)  # [tokens]: each one's place among the readers, or -1
        self.query_lens = Lengths.consecutive(_offsets([len(part.queries) for part in parts]), device)
        places, reads = PrefixPlaces(batch), [(part.prefix, part.stop) for part in parts if part.prefix is not None]
        lens = [length for _, length in reads]
        if reads_in_place:
            found = OverlappingRanges.of(places, reads)
            self.pieces = found.pieces
            self.key_lens = Lengths.overlapping(found.starts, lens, device)
        else:
            self.pieces = join_pieces(piece for read in reads for piece in places.pieces(*read))
            self.key_lens = Lengths.consecutive(_offsets(lens), device)


@dataclass(frozen=True)
class Lengths:
    """Where sequences are in a flat run of tokens, as the kernel wants it."""

    offsets: Tensor  # [sequences + 1] int32: where each begins and, unless `used` says so, where it ends
    max_len: int
    used: Tensor | None = None  # [sequences] int32: how many tokens each has

    @classmethod
    def consecutive(cls, offsets: Sequence[int], device: torch.device) -> Lengths:
        """Each begins where the one before it ends."""
        longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
        return cls(upload(np.array(offsets, np.int32), device), max(longest, _LEAST_MAX_LEN))

    @classmethod
    def overlapping(cls, starts: Sequence[int], lens: Sequence[int], device: torch.device) -> Lengths:
        """Each begins where it likes, so offsets need not grow, and only `used` says where one ends."""
        offsets, used = np.array([*starts, starts[-1] + lens[-1]], np.int32), np.array(lens, np.int32)
        return cls(upload(offsets, device), max(_LEAST_MAX_LEN, *lens), upload(used, device))


def _offsets(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def flash(q: Tensor, k: Tensor, v: Tensor, q_lens: Lengths, k_lens: Lengths, *, causal: bool) -> FlashPart:
    """q [T, N, H], k and v [C, K, H]; slices of wider rows too, since the kernel needs only whole heads."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        q_lens.offsets,
        k_lens.offsets,
        q_lens.max_len,
        k_lens.max_len,
        0.0,
        causal,
        False,
        seqused_k=k_lens.used,
    )
    return out, lse
