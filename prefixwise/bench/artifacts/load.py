"""A server under load."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from prefixwise.bench.artifacts.base import Artifact

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


class LatencyOfAll(Artifact):
    """Percentiles over all arrivals, with one that was dropped or failed as waiting for ever: None is for ever."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class Goodput(Artifact):
    """What was answered in time. An arrival that was dropped or failed is as one that came too late."""

    p99_bound_ms: float = Field(gt=0)
    requests_per_sec: float  # of `rate_sec`
    items_per_sec: float
    share_within_bound: float = Field(ge=0, le=1)  # of all arrivals
    bound_met: bool  # by the p99 of all arrivals


class LoadPhase(Artifact):
    """All arrivals of one phase, and what became of them. Figures are None where nothing was answered.

    Rates of answers are per second of `rate_sec`: the time of sending, or, where the server fell behind, the time
    until its answers were there, less what the fastest took. The last answer in a hundred (one at least, of twenty or
    more) is not waited for: one that hangs does not make a server slow. In a closed loop, which sends only when it is
    answered, all rates are by the time until the answers were there.
    """

    arrivals: int = Field(ge=0)
    sent: int = Field(ge=0)
    dropped: int = Field(ge=0)  # there were `max_in_flight` in flight already
    answered: int = Field(ge=0)
    errors_by_code: dict[str, int]
    send_sec: float = Field(ge=0)  # until the last was sent, or for as long as requests were to arrive
    wall_sec: float = Field(ge=0)  # until the last of them was answered, too
    rate_sec: float | None = Field(default=None, ge=0)  # None in older files, whose rates are by `wall_sec`
    drain_sec: float | None = Field(default=None, ge=0)  # from the end of sending to the last answer
    qps_offered: float  # by the schedule
    qps_sent: float
    qps_answered: float
    items_per_sec: float
    latency: Spread | None  # from the intended send time
    latency_with_failures: LatencyOfAll | None = None
    service_latency: Spread | None  # from the actual send
    sender_late: Spread | None  # from the intended send time to the actual one
    client_limited: bool = False  # this machine sent too late: the figures are the client's, not the server's
    goodput: Goodput | None


class RateProbe(Artifact):
    """One rate of a search, tried once."""

    rate_qps: float
    arrivals: int | None = None
    p99_ms: float | None
    share_within_bound: float
    bound_met: bool
    client_limited: bool = False


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
    max_in_flight: int  # of a closed loop: its concurrency
    client_overhead: Spread | None  # a call to a server that answers at once; None where it could not be measured
    client_overhead_in_flight: int | None = None  # while so many were in flight, this one with them
    warmup: LoadPhase | None
    measured: LoadPhase
    rate_search: list[RateProbe]
    cut_short: bool = False  # by an interrupt: what was done until then
    notes: list[str]
