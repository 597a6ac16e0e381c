"""Partial softmaxes: attention over some of the keys, and the merge of two such parts by their log-sum-exps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # output [.., H] and log-sum-exp [..], both float32
NEG_INF = float("-inf")


def merge(first: Partial, second: Partial) -> Partial:
    """Two partial softmaxes over disjoint keys to one. A part with log-sum-exp -inf leaves the other bit for bit."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    peak = torch.maximum(lse_a, lse_b)
    peak = torch.where(peak == NEG_INF, torch.zeros_like(peak), peak)
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = weight_a + weight_b
    share_a, share_b = (weight_a / total).unsqueeze(-1), (weight_b / total).unsqueeze(-1)
    return out_a * share_a + out_b * share_b, peak + torch.log(total)


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
