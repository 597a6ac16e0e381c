"""A rough estimate of the time that an algorithm takes, to choose between algorithms.

The figures of each kind of device are static.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.contract.ragged import Int64Array
from prefixwise.models.config import ModelConfig


@dataclass(frozen=True)
class DeviceFigures:
    """The speed of a kind of device."""

    flops_per_second: float  # large GEMMs in half precision
    seconds_per_forward: float  # launches, Python, padding of the smallest batch


# cpu: two cores with AMX; gpu: an H200; tpu: a v6e chip at half its published rate.
STATIC_FIGURES: dict[str, DeviceFigures] = {
    "cpu": DeviceFigures(0.8e12, 0.03),
    "gpu": DeviceFigures(6e14, 0.004),
    "tpu": DeviceFigures(4.5e14, 0.003),
}


@dataclass(frozen=True)
class Work:
    """The work of an algorithm: tokens through the linear layers, query-key pairs, forwards."""

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
class SegmentSums:
    """The sums over a request's segments that the estimates need."""

    num_segments: int
    num_tokens: int
    num_pairs: int  # query-key pairs within segments: half of the squares

    @classmethod
    def of(cls, segment_lens: Int64Array) -> SegmentSums:
        return cls(len(segment_lens), int(segment_lens.sum()), int(np.dot(segment_lens, segment_lens)) // 2)


def packed_work(prefix_len: int, segments: SegmentSums, num_sequences: int, token_budget: int, multiple: int) -> Work:
    """Sequences of the prefix and some segments each; `serial` has one sequence per segment."""
    tokens = segments.num_tokens + prefix_len * num_sequences
    pairs = num_sequences * prefix_len**2 // 2 + prefix_len * segments.num_tokens + segments.num_pairs
    return Work(_padded(tokens, multiple), pairs, -(-tokens // token_budget))


def extend_work(
    prefix_len: int, segments: SegmentSums, token_budget: int, multiple: int, *, joins: bool = False
) -> Work:
    """The prefix in a forward of its own, then the item tokens; with `joins` both in one sequence."""
    if joins:
        return packed_work(prefix_len, segments, 1, token_budget, multiple)
    tokens = _padded(prefix_len, multiple) + _padded(segments.num_tokens, multiple)
    pairs = prefix_len**2 // 2 + prefix_len * segments.num_tokens + segments.num_pairs
    return Work(tokens, pairs, bool(prefix_len) + -(-segments.num_tokens // token_budget))


def _padded(num_tokens: int, multiple: int) -> int:
    return -(-num_tokens // multiple) * multiple
