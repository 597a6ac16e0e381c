"""Attention over segments on CUDA in half precision: two variable-length flash attentions, merged by LSE.

One call is the self-attention of every segment (causal), one takes every query over its prefix (no mask, one "sequence"
per prefix and length). The kernel walks each sequence in tiles of its own, from the sequence's start, and never splits
the keys of one query between programs, so a row's bits do not depend on other sequences. Queries, keys and values are
read where the projection left them; outputs stay in half precision, and the merge is one of the `ElementwiseOps`.

A prefix whose KV blocks are in the batch is read at as many lengths as it has blocks. Either every range is copied, or
all are read from one array that holds each prefix once (READS_IN_PLACE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.attention import Attention, split_heads
from prefixwise.backends.torch.dense_mask import DenseMask
from prefixwise.backends.torch.devices import token_index, upload
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps, FlashPart, pad_with_zeros
from prefixwise.backends.torch.kv_blocks import KeysValues, OverlappingRanges, PrefixLocations, join_pieces, read_pieces
from prefixwise.backends.torch.softmax import NEG_INF
from prefixwise.backends.torch.tiles import FullRange, cut_diagonals, cut_full_ranges, prefix_ranges
from prefixwise.forward.batch import ForwardBatch, Layout

# With one query per sequence the kernel would take another path (heads folded, keys split), with other bits.
_MIN_MAX_LEN = 128

READS_IN_PLACE = True  # may ranges of keys overlap? If not, each range is copied


class VarlenAttention(Attention):
    """For bfloat16 and float16 on a GPU; head sizes up to 256 that are multiples of 8; no sliding windows."""

    def __init__(
        self,
        batch: ForwardBatch,
        device: torch.device,
        elementwise_ops: ElementwiseOps = PLAIN,
        *,
        reads_in_place: bool = READS_IN_PLACE,
        is_causal: bool = True,  # within a segment
    ) -> None:
        self._is_causal = is_causal
        self._ops = elementwise_ops
        self._num_tokens = batch.num_tokens
        self._segment_lens = Lengths.consecutive([int(n) for n in batch.segment_starts], device)
        parts = prefix_ranges(batch)
        self._readers = _Readers(batch, parts, device, reads_in_place=reads_in_place) if parts else None
        self._dense: DenseMask | None = None
        if batch.layout is Layout.PACKED and batch.mask == "dense":
            self._dense = DenseMask(
                batch, cut_diagonals(batch, padded=True, filled=True), cut_full_ranges(batch), device
            )

    def __call__(self, qkv: Tensor, num_heads: int, cached: KeysValues | None, window: int = 0) -> Tensor:
        assert not window, "PyTorch's flash attention has no windows over prefixes of many segments"
        q, k, v = split_heads(qkv, num_heads)
        real, readers = slice(0, self._num_tokens), self._readers
        lens = self._segment_lens
        self_part = flash(q[real], k[real], v[real], lens, lens, causal=self._is_causal)
        prefix_part: FlashPart | None = None
        if readers is None:
            out = pad_with_zeros(self_part[0], len(q))
        else:
            keys, values = read_pieces(readers.pieces, k, v, cached)
            prefix_part = flash(q[readers.tokens], keys, values, readers.query_lens, readers.key_lens, causal=False)
            out = self._ops.merge(self_part, prefix_part, readers.prefix_rows, len(q))
        if self._dense is None:
            return out
        merged = out.float(), self._merged_lse(self_part, prefix_part, len(q))
        self._dense.attend_rest(q, k, v, merged)
        return merged[0]

    def _merged_lse(self, self_part: FlashPart, prefix_part: FlashPart | None, num_rows: int) -> Tensor:
        """[num_rows, N]: the log-sum-exps that the dense mask merges into."""
        lse = F.pad(self_part[1].T, (0, 0, 0, num_rows - self._num_tokens), value=NEG_INF)
        if self._readers is not None and prefix_part is not None:
            tokens = self._readers.tokens
            lse[tokens] = torch.logaddexp(lse[tokens], prefix_part[1].T)
        return lse


class _Readers:
    """The tokens that read a prefix, in the order of the ranges, and where the ranges lie."""

    def __init__(
        self, batch: ForwardBatch, parts: Sequence[FullRange], device: torch.device, *, reads_in_place: bool
    ) -> None:
        queries = np.concatenate([part.queries for part in parts])
        prefix_rows = np.full(batch.num_tokens, -1, np.int32)
        prefix_rows[queries] = np.arange(len(queries))
        self.tokens = token_index(queries, device)
        self.prefix_rows = upload(prefix_rows, device)  # [tokens]: the token's row among the readers, or -1
        self.query_lens = Lengths.consecutive(_offsets([len(part.queries) for part in parts]), device)
        locations, reads = (
            PrefixLocations(batch),
            [(part.prefix, part.stop) for part in parts if part.prefix is not None],
        )
        lens = [length for _, length in reads]
        if reads_in_place:
            found = OverlappingRanges.of(locations, reads)
            self.pieces = found.pieces
            self.key_lens = Lengths.overlapping(found.starts, lens, device)
        else:
            self.pieces = join_pieces(piece for read in reads for piece in locations.pieces(*read))
            self.key_lens = Lengths.consecutive(_offsets(lens), device)


@dataclass(frozen=True)
class Lengths:
    """Where sequences lie in a flat run of tokens, in the form that the kernel takes."""

    offsets: Tensor  # [sequences + 1] int32: where each begins and, without `used`, where it ends
    max_len: int
    used: Tensor | None = None  # [sequences] int32: how many tokens each has

    @classmethod
    def consecutive(cls, offsets: Sequence[int], device: torch.device) -> Lengths:
        """Each begins where the one before it ends."""
        longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
        return cls(upload(np.array(offsets, np.int32), device), max(longest, _MIN_MAX_LEN))

    @classmethod
    def overlapping(cls, starts: Sequence[int], lens: Sequence[int], device: torch.device) -> Lengths:
        """Each may begin anywhere, so offsets need not grow, and `used` says where each ends."""
        offsets, used = np.array([*starts, starts[-1] + lens[-1]], np.int32), np.array(lens, np.int32)
        return cls(upload(offsets, device), max(_MIN_MAX_LEN, *lens), upload(used, device))


def _offsets(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def flash(q: Tensor, k: Tensor, v: Tensor, q_lens: Lengths, k_lens: Lengths, *, causal: bool) -> FlashPart:
    """q [T, N, H], k and v [C, K, H]; slices of wider rows work too, since only heads must be contiguous."""
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
