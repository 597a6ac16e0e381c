"""The cost model: the seconds of a forward, from its tokens and the query-key pairs of its attention.

    seconds = per forward + per token x tokens (with padding) + per pair x pairs

The figures are static for a kind of device at first. Probes calibrate them at warm-up (`engine/calibration.py`), and
the steps that run correct them. They bound steps in time (`engine/step_filler.py`) and, where all algorithms
give the same bits, choose between algorithms (`algorithms.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.backend import BackendInfo, DeviceKind
from prefixwise.models.config import ModelConfig

MAX_FIXED_SHARE = 0.15  # of the seconds of an accelerator's step: launches, and reading the weights
MAX_CHANGE = 4.0  # a step counts as at most this many times slower than expected: it may have waited for a compiler
SLOWER_WEIGHT, FASTER_WEIGHT = 0.1, 0.5  # of a step: other programs make a device slower at times, never faster
PRIOR_WEIGHT = 0.01  # of the static proportions in a fit: they decide what the probes leave open
LEAST_OF_STATIC = 0.1  # no figure of a fit is less than this part of the static one at the measured speed


@dataclass(frozen=True)
class Work:
    """The work of a forward, or of several."""

    num_tokens: int  # through the linear layers, with padding
    num_pairs: int  # query-key pairs
    num_forwards: int = 1


@dataclass(frozen=True)
class CostModel:
    """The figures of a model on a device."""

    seconds_per_forward: float  # launches, Python, reading the weights once
    seconds_per_token: float  # linear layers
    seconds_per_pair: float  # attention: a token and another that it attends to

    def seconds(self, work: Work) -> float:
        fixed = self.seconds_per_forward * work.num_forwards
        return fixed + self.seconds_per_token * work.num_tokens + self.seconds_per_pair * work.num_pairs

    @property
    def pairs_per_token(self) -> float:
        """Pairs that take as long as the linear layers of one token."""
        return self.seconds_per_token / self.seconds_per_pair

    def tokens_within(self, seconds: float, num_forwards: int) -> int:
        """Tokens without attention that so many forwards compute in this time."""
        return max(0, int((seconds - num_forwards * self.seconds_per_forward) / self.seconds_per_token))

    def tokens_for_fixed_share(self, share: float) -> int:
        """Least tokens without attention of a forward whose fixed cost is at most this part of its seconds."""
        return math.ceil((1 / share - 1) * self.seconds_per_forward / self.seconds_per_token)

    def scaled(self, factor: float) -> CostModel:
        return CostModel(
            factor * self.seconds_per_forward, factor * self.seconds_per_token, factor * self.seconds_per_pair
        )


def tokens_of_step(costs: CostModel, backend: BackendInfo, times: float = 1.0) -> int:
    """Most tokens without attention that a step may have: those of `times` x `step_seconds`, but at least
    `least_step_tokens`.

    An accelerator's step is longer where the fixed cost of its forward would be more than MAX_FIXED_SHARE of it, as
    with large models. A CPU's step is not: it takes long enough to wait for.

    A whole bucket, or a multiple of `least_step_tokens`, so that a full step has no padding.
    """
    if backend.step_seconds is None:
        return backend.step_tokens
    num_tokens = costs.tokens_within(times * backend.step_seconds, num_forwards=1 if backend.joins_prefill else 2)
    if backend.device_kind != "cpu":
        num_tokens = max(num_tokens, costs.tokens_for_fixed_share(MAX_FIXED_SHARE))
    num_tokens = min(num_tokens, backend.step_tokens)
    if backend.token_buckets:
        whole = max((size for size in backend.token_buckets if size <= num_tokens), default=0)
    else:
        whole = num_tokens // backend.least_step_tokens * backend.least_step_tokens
    return min(max(whole, backend.least_step_tokens), backend.step_tokens)


# Static figures


@dataclass(frozen=True)
class DeviceFigures:
    """The speed of a kind of device."""

    flops_per_second: float  # large GEMMs in half precision
    launch_seconds: float  # of a forward
    bytes_per_second: float = math.inf  # of its memory; inf: `launch_seconds` has the time to read the weights


BYTES_PER_WEIGHT = 2  # half precision

# cpu: two cores with AMX; gpu: an H200; tpu: a v6e chip at half its published rate.
STATIC_FIGURES: dict[DeviceKind, DeviceFigures] = {
    "cpu": DeviceFigures(0.8e12, 0.03),
    "gpu": DeviceFigures(6e14, 0.0015, 4e12),
    "tpu": DeviceFigures(4.5e14, 0.0025, 1.6e12),
}


def static_costs(config: ModelConfig, kind: DeviceKind) -> CostModel:
    """The model's bytes and floating-point operations at the rates of a device of this kind.

    A forward reads the weights of all experts, and a token uses those of a few.
    """
    d, h, layers, figures = config.model_size, config.head_size, config.num_layers, STATIC_FIGURES[kind]
    experts = config.experts
    num_read, num_used = (1, 1) if experts is None else (experts.num_experts, experts.experts_per_token)
    attention, mlp = 2 * (config.num_heads + config.num_kv_heads) * h * d, 3 * d * config.mlp_size
    bytes_read = BYTES_PER_WEIGHT * layers * (attention + mlp * num_read)
    return CostModel(
        figures.launch_seconds + bytes_read / figures.bytes_per_second,
        2 * layers * (attention + mlp * num_used) / figures.flops_per_second,
        4 * layers * config.num_heads * h / figures.flops_per_second,
    )


# Measured figures


@dataclass(frozen=True)
class Sample:
    """Measured work."""

    work: Work
    seconds: float


class MeasuredCosts:
    """The cost model of this machine. One thread changes it; any thread may read `model`."""

    def __init__(self, static: CostModel) -> None:
        self.model = static
        self._static = static
        self._is_calibrated = False
        self._num_steps = 0

    @property
    def source(self) -> str:
        """What the figures are: static, measured or calibrated."""
        return "calibrated" if self._is_calibrated else "measured" if self._num_steps else "static"

    def calibrate(self, samples: Sequence[Sample]) -> None:
        """Fit the figures to probes."""
        self.model = fit(samples, self._static)
        self._is_calibrated = True

    def record(self, sample: Sample) -> None:
        """Correct the figures by a step that has run: half of it as the speed of the machine, in all figures alike, and
        half by their shares of the step, so that steps of several kinds correct the proportions too.

        The first steps count more, unless the model was calibrated. A step that is mostly the fixed cost of its
        forwards says little of the rest.
        """
        parts = _parts(self.model, sample.work)
        expected = sum(parts)
        change = min(max(sample.seconds, 1e-9) / expected, MAX_CHANGE)
        weight = FASTER_WEIGHT if change < 1.0 else SLOWER_WEIGHT
        self._num_steps += 1
        if not self._is_calibrated:
            weight = max(weight, 1.0 / self._num_steps)
        weight *= 1.0 - parts[0] / expected
        largest = max(parts[1], parts[2], 1e-12)
        factors = [change ** (weight * (0.5 + 0.5 * min(1.0, part / largest))) for part in parts]
        self.model = CostModel(*(figure * factor for figure, factor in zip(astuple(self.model), factors, strict=True)))


def fit(samples: Sequence[Sample], static: CostModel) -> CostModel:
    """The figures with the least squares of relative errors, near the static proportions where samples are few."""
    scale = math.exp(float(np.mean([math.log(each.seconds / static.seconds(each.work)) for each in samples])))
    prior = static.scaled(scale)
    parts = np.array([_parts(prior, each.work) for each in samples]) / np.array([[each.seconds] for each in samples])
    rows = np.concatenate([parts, PRIOR_WEIGHT * np.eye(3)])  # the unknowns are factors of the prior's figures
    expected = np.concatenate([np.ones(len(samples)), np.full(3, PRIOR_WEIGHT)])
    found = np.maximum(np.linalg.lstsq(rows, expected)[0], LEAST_OF_STATIC)
    return CostModel(
        prior.seconds_per_forward * float(found[0]),
        prior.seconds_per_token * float(found[1]),
        prior.seconds_per_pair * float(found[2]),
    )


def _parts(costs: CostModel, work: Work) -> tuple[float, float, float]:
    return (
        costs.seconds_per_forward * work.num_forwards,
        costs.seconds_per_token * work.num_tokens,
        costs.seconds_per_pair * work.num_pairs,
    )


# The work of algorithms


@dataclass(frozen=True)
class SegmentSums:
    """The sums over a request's segments that the estimates need."""

    num_segments: int
    num_tokens: int
    num_pairs: int  # query-key pairs within segments: half of the squares

    @classmethod
    def of(cls, segment_lens: Int64Array) -> SegmentSums:
        return cls(len(segment_lens), int(segment_lens.sum()), int(np.dot(segment_lens, segment_lens)) // 2)


def packed_work(prefix_len: int, segments: SegmentSums, num_sequences: int, step_tokens: int, multiple: int) -> Work:
    """Sequences of the prefix and some segments each; `serial` has one sequence per segment."""
    tokens = segments.num_tokens + prefix_len * num_sequences
    pairs = num_sequences * prefix_len**2 // 2 + prefix_len * segments.num_tokens + segments.num_pairs
    return Work(_padded(tokens, multiple), pairs, -(-tokens // step_tokens))


def extend_work(
    prefix_len: int, segments: SegmentSums, step_tokens: int, multiple: int, *, joins: bool = False
) -> Work:
    """The prefix in forwards of its own, then the item tokens; with `joins` both in one sequence."""
    if joins:
        return packed_work(prefix_len, segments, 1, step_tokens, multiple)
    tokens = _padded(prefix_len, multiple) + _padded(segments.num_tokens, multiple)
    pairs = prefix_len**2 // 2 + prefix_len * segments.num_tokens + segments.num_pairs
    return Work(tokens, pairs, -(-prefix_len // step_tokens) + -(-segments.num_tokens // step_tokens))


def cached_extend_work(prefix_len: int, segments: SegmentSums, step_tokens: int, multiple: int) -> Work:
    """The item tokens alone, behind a prefix in the KV cache."""
    pairs = prefix_len * segments.num_tokens + segments.num_pairs
    return Work(_padded(segments.num_tokens, multiple), pairs, -(-segments.num_tokens // step_tokens))


def _padded(num_tokens: int, multiple: int) -> int:
    return -(-num_tokens // multiple) * multiple
