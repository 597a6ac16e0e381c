"""How long an algorithm would take, roughly: enough to choose between them, never to promise anything.

Figures are static per kind of device until a warm-up measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.contract.ragged import Int64Array
from prefixwise.models.config import ModelConfig


@dataclass(frozen=True)
class DeviceFigures:
    """What a kind of device does, in the units of `estimate_seconds`."""

    flops_per_second: float  # large matrix products in half precision
    seconds_per_forward: float  # launches, Python, padding of the smallest batch


# cpu: two cores with AMX; gpu: an H200; tpu: a v6e chip at half its published rate.
STATIC_FIGURES: dict[str, DeviceFigures] = {
    "cpu": DeviceFigures(0.8e12, 0.03),
    "gpu": DeviceFigures(6e14, 0.004),
    "tpu": DeviceFigures(4.5e14, 0.003),
}


@dataclass(frozen=True)
class Work:
    """What an algorithm computes: tokens through the linear layers, query-key pairs, forwards."""

    num_tokens: int
    num_pairs: int
    num_forwards: int


def estimate_seconds(config: ModelConfig, work: Work, figures: DeviceFigures) -> float:
    """Linear layers and attention at the device's rate, plus a cost per forward."""
    d, h = config.model_size, config.head_size
    heads = config.num_heads + 2 * config.num_kv_heads
    weights_per_layer = heads * h * d + config.num_heads * h * d + 3 * d * config.mlp_size
    linear = 2 * weights_per_layer * config.num_layers * work.num_tokens
    attention = 4 * config.num_heads * h * config.num_layers * work.num_pairs
    return (linear + attention) / figures.flops_per_second + work.num_forwards * figures.seconds_per_forward


@dataclass(frozen=True)
class TailSums:
    """What the estimates need to know of the tails."""

    num_tails: int
    num_tokens: int
    num_pairs: int  # of tokens of one tail, half of the square

    @classmethod
    def of(cls, tail_lens: Int64Array) -> TailSums:
        return cls(len(tail_lens), int(tail_lens.sum()), int(np.dot(tail_lens, tail_lens)) // 2)


def packed_work(prefix_len: int, tails: TailSums, num_rows: int, token_budget: int, multiple: int) -> Work:
    """Rows of the prefix and some tails each; `serial` is the case of one row per tail."""
    tokens = tails.num_tokens + prefix_len * num_rows
    pairs = num_rows * prefix_len**2 // 2 + prefix_len * tails.num_tokens + tails.num_pairs
    return Work(_padded(tokens, multiple), pairs, -(-tokens // token_budget))


def extend_work(prefix_len: int, tails: TailSums, token_budget: int, multiple: int, *, joins: bool = False) -> Work:
    """The prefix in a forward of its own, then the tails; with `joins` one behind the other, as in one row."""
    if joins:
        return packed_work(prefix_len, tails, 1, token_budget, multiple)
    tokens = _padded(prefix_len, multiple) + _padded(tails.num_tokens, multiple)
    pairs = prefix_len**2 // 2 + prefix_len * tails.num_tokens + tails.num_pairs
    return Work(tokens, pairs, bool(prefix_len) + -(-tails.num_tokens // token_budget))


def _padded(num_tokens: int, multiple: int) -> int:
    return -(-num_tokens // multiple) * multiple
