"""A stand-in for the device's variable-length flash attention, so that what surrounds it is tested anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixwise.backends.torch.elementwise import FlashPart
from prefixwise.backends.torch.softmax import masked_softmax
from prefixwise.backends.torch.varlen import Lengths


def flash_on_a_cpu(q: Tensor, k: Tensor, v: Tensor, q_lens: Lengths, k_lens: Lengths, *, causal: bool) -> FlashPart:
    """Sequence by sequence, in float32; the output rounded to q's dtype, the log-sum-exps as [N, T]."""
    outs, sums = [], []
    group = q.shape[1] // k.shape[1]
    for number in range(len(q_lens.offsets) - 1):
        queries, keys, values = (
            each[_tokens(lens, number)].float().transpose(0, 1)
            for each, lens in ((q, q_lens), (k, k_lens), (v, k_lens))
        )
        hidden = (
            torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).triu(1) if causal else torch.tensor(False)
        )
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        out, lse = masked_softmax(queries[None], keys[None], values[None], hidden)
        outs.append(out[0].transpose(0, 1).to(q.dtype))
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, 1)


def _tokens(lens: Lengths, number: int) -> slice:
    start, stop = (int(each) for each in lens.offsets[number : number + 2])
    return slice(start, stop if lens.used is None else start + int(lens.used[number]))
