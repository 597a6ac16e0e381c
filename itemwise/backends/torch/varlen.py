"""Attention over segments on CUDA in half precision: two variable-length flash attentions and a merge.

One call takes every segment's own tokens (causal), one takes every query over its prefix (no mask, one "sequence" per
prefix and length). The kernel walks each sequence in tiles of its own, from the sequence's start, and never splits the
keys of one query between blocks, so a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from itemwise.backends.base import ForwardBatch, Layout
from itemwise.backends.torch.attention import Attention, KeysValues, batch_prefix_starts, keys_of
from itemwise.backends.torch.dense_mask import DenseMask
from itemwise.backends.torch.softmax import NEG_INF, Partial, merge
from itemwise.backends.torch.tiles import cut_diagonals, cut_full_ranges, prefix_ranges
from itemwise.contract.ragged import Int64Array

# With one query row per sequence the kernel would take another path (heads folded, keys split), with other bits.
_LEAST_MAX_LEN = 128


class VarlenAttention(Attention):
    """For bfloat16 and float16 on a GPU; head sizes up to 256 that are multiples of 8."""

    def __init__(self, batch: ForwardBatch, device: torch.device) -> None:
        self._num_tokens = batch.num_tokens
        self._own = _Lengths([int(n) for n in batch.segment_starts], device)
        self._ranges = prefix_ranges(batch)
        self._prefix_starts = batch_prefix_starts(batch)
        self._query_lens = _Lengths(_offsets([len(part.queries) for part in self._ranges]), device)
        self._key_lens = _Lengths(_offsets([part.stop for part in self._ranges]), device)
        self._readers = _token_index([part.queries for part in self._ranges], device) if self._ranges else None
        self._dense: DenseMask | None = None
        if batch.layout is Layout.PACKED and batch.mask == "dense":
            self._dense = DenseMask(batch, cut_diagonals(batch), cut_full_ranges(batch), device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prefixes: Sequence[KeysValues | None]) -> Tensor:
        real = slice(0, self._num_tokens)
        own_out, own_lse = _flash(q[real], k[real], v[real], self._own, self._own, causal=True)
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], NEG_INF, dtype=torch.float32, device=q.device)
        out[real], lse[real] = own_out, own_lse
        if self._readers is not None:
            readers = self._readers
            keys, values = self._gather_prefixes(k, v, prefixes)
            part = _flash(q[readers], keys, values, self._query_lens, self._key_lens, causal=False)
            out[readers], lse[readers] = merge((out[readers], lse[readers]), part)
        if self._dense is not None:
            self._dense.attend_rest(q, k, v, (out, lse))
        return out

    def _gather_prefixes(self, k: Tensor, v: Tensor, prefixes: Sequence[KeysValues | None]) -> KeysValues:
        """The keys and values of all ranges, one after the other; a single one is a view."""
        pairs = [keys_of(part, self._prefix_starts, k, v, prefixes) for part in self._ranges]
        if len(pairs) == 1:
            return pairs[0]
        return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def _token_index(queries: Sequence[Int64Array], device: torch.device) -> Tensor | slice:
    """All these tokens, as a slice where they follow each other, so that nothing is copied to take them."""
    tokens = np.concatenate(queries)
    if np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens))):
        return slice(int(tokens[0]), int(tokens[0]) + len(tokens))
    return torch.from_numpy(tokens).to(device)


class _Lengths:
    """Offsets of sequences in a flat run of tokens, as the kernel wants them."""

    def __init__(self, offsets: Sequence[int], device: torch.device) -> None:
        self.offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
        longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
        self.max_len = max(longest, _LEAST_MAX_LEN)


def _offsets(lens: Sequence[int]) -> list[int]:
    return list(accumulate(lens, initial=0))


def _flash(q: Tensor, k: Tensor, v: Tensor, q_lens: _Lengths, k_lens: _Lengths, *, causal: bool) -> Partial:
    """q [T, N, H], k and v [C, K, H] to output [T, N, H] float32 and log-sum-exp [T, N]."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        q_lens.offsets,
        k_lens.offsets,
        q_lens.max_len,
        k_lens.max_len,
        0.0,
        causal,
        False,
    )
    return out.float(), lse.transpose(0, 1)
