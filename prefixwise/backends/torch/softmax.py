"""Partial softmaxes: attention over some of the keys, and the merge of two parts by their log-sum-exps (LSE)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]  # output [.., H] and log-sum-exp [..], both float32
NEG_INF = float("-inf")


@dataclass(frozen=True)
class ScoreRule:
    """How the dot product of a query and a key becomes a score."""

    scale: float | None = None  # None: 1 / sqrt(H)
    softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap); 0: it stays s

    def scale_of(self, head_size: int) -> float:
        return 1.0 / math.sqrt(head_size) if self.scale is None else self.scale


PLAIN_SCORES = ScoreRule()


def merge(first: Partial, second: Partial) -> Partial:
    """Merge two partial softmaxes over disjoint keys. A part with log-sum-exp -inf leaves the other bit for bit."""
    share_a, share_b, lse = _shares(first[1], second[1])
    return first[0] * share_a + second[0] * share_b, lse


def merge_into(first: Partial, second: Partial, *, keeps_lse: bool = True) -> None:
    """The same, in place: the first part becomes the result, and the second part's output is overwritten.

    One of the parts sees a key. Without `keeps_lse` the first part's log-sum-exp is not that of the result.
    """
    max_lse = torch.maximum(first[1], second[1])
    share_a, share_b = (first[1] - max_lse).exp_(), (second[1] - max_lse).exp_()
    weight_sum = share_a + share_b
    share_a.div_(weight_sum)
    share_b.div_(weight_sum)
    first[0].mul_(share_a.unsqueeze(-1)).add_(second[0].mul_(share_b.unsqueeze(-1)))
    if keeps_lse:
        torch.add(max_lse, weight_sum.log_(), out=first[1])


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights [.., 1] of two parts, and the log-sum-exp of both."""
    max_lse = torch.maximum(lse_a, lse_b)
    max_lse.masked_fill_(max_lse == NEG_INF, 0.0)
    weight_a, weight_b = torch.exp(lse_a - max_lse), torch.exp(lse_b - max_lse)
    weight_sum = weight_a + weight_b
    return (weight_a / weight_sum).unsqueeze(-1), (weight_b / weight_sum).unsqueeze(-1), max_lse + torch.log(weight_sum)


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, rule: ScoreRule = PLAIN_SCORES) -> Partial:
    """Plain attention in float32 with a mask; a row that sees nothing gives 0 and -inf.

    q [B, K, R, H], k and v [B, K, C, H], `hidden` broadcastable to [B, K, R, C], True where a key may not be seen.
    """
    scores = torch.matmul(q * rule.scale_of(q.shape[-1]), k.transpose(-1, -2))
    if rule.softcap:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores.masked_fill_(hidden, NEG_INF)  # not added: the score of a hidden key may be NaN
    max_score = scores.amax(-1, keepdim=True)
    max_score.masked_fill_(max_score == NEG_INF, 0.0)
    weights = scores.sub_(max_score).exp_()
    weight_sum = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v).div_(weight_sum).masked_fill_(weight_sum == 0, 0.0)
    return out, (max_score + torch.log(weight_sum)).squeeze(-1)
