"""Partial softmaxes: attention over some of the keys, and the merge of two such parts by their log-sum-exps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # output [.., H] and log-sum-exp [..], both float32
NEG_INF = float("-inf")


def merge(first: Partial, second: Partial) -> Partial:
    """Two partial softmaxes over disjoint keys to one. A part with log-sum-exp -inf leaves the other bit for bit."""
    share_a, share_b, lse = _shares(first[1], second[1])
    return first[0] * share_a + second[0] * share_b, lse


def merge_into(first: Partial, second: Partial) -> None:
    """The same, with the result in place of the first; the second's output is used up."""
    share_a, share_b, lse = _shares(first[1], second[1])
    first[0].mul_(share_a).add_(second[0].mul_(share_b))
    first[1].copy_(lse)


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights [.., 1] of two parts, and the log-sum-exp of both."""
    peak = torch.maximum(lse_a, lse_b)
    peak = torch.where(peak == NEG_INF, torch.zeros_like(peak), peak)
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = weight_a + weight_b
    return (weight_a / total).unsqueeze(-1), (weight_b / total).unsqueeze(-1), peak + torch.log(total)


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Partial:
    """Plain attention in float32 with a mask; a row that sees nothing gives 0 and -inf.

    q [B, K, R, H], k and v [B, K, C, H], `hidden` broadcastable to [B, K, R, C], True where a key may not be seen.
    """
    scores = torch.matmul(q * (1.0 / math.sqrt(q.shape[-1])), k.transpose(-1, -2))
    scores.masked_fill_(hidden, NEG_INF)  # not added: a hidden key may be anything, NaN included
    peak = scores.amax(-1, keepdim=True)
    peak.masked_fill_(peak == NEG_INF, 0.0)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v).div_(total).masked_fill_(total == 0, 0.0)
    return out, (peak + torch.log(total)).squeeze(-1)
