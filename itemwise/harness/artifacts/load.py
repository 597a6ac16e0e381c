"""A server under load."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from itemwise.harness.artifacts.base import Artifact

LOAD_VERSION: Literal["score_load_v1"] = "score_load_v1"


class LoadGeometry(Artifact):
    """What every request looks like."""

    query_tokens: int = Field(ge=1)
    num_items: int = Field(ge=1)
    item_tokens: int = Field(ge=0)
    label_token_ids: list[int] = Field(min_length=1)
    vocab_size: int = Field(ge=1)
    distinct_queries: int = Field(ge=0)  # 0: every request has its own


class Spread(Artifact):
    """How times are spread, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    mean_ms: float


class Goodput(Artifact):
    """What was answered in time. An arrival that was dropped or failed is as one that came too late."""

    p99_bound_ms: float = Field(gt=0)
    requests_per_sec: float
    items_per_sec: float
    share_within_bound: float = Field(ge=0, le=1)  # of all arrivals
    bound_met: bool  # by the p99 of all arrivals


class LoadPhase(Artifact):
    """All arrivals of one phase, and what became of them. Figures are None where nothing was answered."""

    arrivals: int = Field(ge=0)
    sent: int = Field(ge=0)
    dropped: int = Field(ge=0)  # there were `max_in_flight` in flight already
    answered: int = Field(ge=0)
    errors_by_code: dict[str, int]
    send_sec: float = Field(ge=0)  # how long requests arrived
    wall_sec: float = Field(ge=0)  # until the last of them was answered, too
    qps_offered: float
    qps_sent: float
    qps_answered: float
    items_per_sec: float
    latency: Spread | None  # from the intended send time
    service_latency: Spread | None  # from the actual send
    sender_late: Spread | None  # from the intended send time to the actual one
    goodput: Goodput | None


class RateProbe(Artifact):
    """One rate of a search."""

    rate_qps: float
    p99_ms: float | None
    share_within_bound: float
    bound_met: bool


class LoadResult(Artifact):
    """`bench load`."""

    schema_version: Literal["score_load_v1"]
    generated_at_utc: str
    url: str
    server_config: dict[str, Any]
    geometry: LoadGeometry
    mode: Literal["open", "closed"]
    rate_qps: float | None
    concurrency: int | None
    seed: int
    timeout_sec: float
    max_in_flight: int
    client_overhead: Spread  # a call to a server that answers at once
    warmup: LoadPhase | None
    measured: LoadPhase
    rate_search: list[RateProbe]
    notes: list[str]
