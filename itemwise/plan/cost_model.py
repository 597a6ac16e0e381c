"""How long an algorithm would take, roughly: enough to choose between them, never to promise anything.

Figures are static per kind of device until a warm-up measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from itemwise.models.config import ModelConfig


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


def packed_work(prefix_len: int, tail_lens: Sequence[int], num_rows: int, token_budget: int, multiple: int) -> Work:
    """Rows of the prefix and some tails each; `serial` is the case of one row per tail."""
    tokens = sum(tail_lens) + prefix_len * num_rows
    pairs = num_rows * prefix_len**2 // 2 + prefix_len * sum(tail_lens) + _own_pairs(tail_lens)
    return Work(_padded(tokens, multiple), pairs, -(-tokens // token_budget))


def extend_work(prefix_len: int, tail_lens: Sequence[int], token_budget: int, multiple: int) -> Work:
    """The prefix in a forward of its own, then the tails."""
    tokens = _padded(prefix_len, multiple) + _padded(sum(tail_lens), multiple)
    pairs = prefix_len**2 // 2 + prefix_len * sum(tail_lens) + _own_pairs(tail_lens)
    return Work(tokens, pairs, bool(prefix_len) + -(-sum(tail_lens) // token_budget))


def _own_pairs(tail_lens: Sequence[int]) -> int:
    return sum(length * length // 2 for length in tail_lens)


def _padded(num_tokens: int, multiple: int) -> int:
    return -(-num_tokens // multiple) * multiple
