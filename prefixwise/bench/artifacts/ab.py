"""Variants against each other on one machine."""

from __future__ import annotations

from typing import Any, Literal

from prefixwise.bench.artifacts.base import Artifact
from prefixwise.bench.artifacts.load import LoadGeometry
from prefixwise.bench.artifacts.matrix import CorrectnessThresholds

AB_VERSION: Literal["score_ab_v1"] = "score_ab_v1"


class ScoreDifferences(Artifact):
    """A variant's scores of the requests that the first variant scored, too."""

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int


class SpeedRatio(Artifact):
    """The first variant's time over this one's, paired by round: 2.0 is twice as fast. It is the ratio of their
    `time_ms`; the interval is Student's, of the logarithms, and None with one round."""

    ratio: float
    low: float | None
    high: float | None
    confidence: float
    num_rounds: int


class AbRun(Artifact):
    """One timed run."""

    round_index: int
    place: int  # in the order of its round
    seconds: float


class AbVariant(Artifact):
    """One of those compared. Figures are None where it failed."""

    name: str
    server_flags: list[str]
    request_fields: dict[str, Any]
    server_config: dict[str, Any]
    status: Literal["ok", "failed"]
    failure: str | None
    time_ms: float | None = None  # the geometric mean of the rounds' medians; None in older files, too
    median_ms: float | None  # of all runs, as the p95 is
    p95_ms: float | None
    items_per_sec: float | None  # by `time_ms`; in older files by the median
    speed_vs_first: SpeedRatio | None
    scores_vs_first: ScoreDifferences | None
    scores_agree: bool
    runs: list[AbRun]


class AbResult(Artifact):
    """`bench ab`."""

    schema_version: Literal["score_ab_v1"]
    generated_at_utc: str
    model: str | None  # None: the embedded one
    compare: str
    geometry: LoadGeometry
    cached: bool
    rounds: int  # that were run to their end
    runs_per_round: int
    warmup_runs: int
    seed: int
    correctness_thresholds: CorrectnessThresholds
    variants: list[AbVariant]
    cut_short: bool = False  # by an interrupt: the rounds that were finished
    notes: list[str]
