"""A server under load: `bench load`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.named import Named, backend_name
from prefixwise.bench.render.document import NONE, Block, Cell, Paragraph, bullets, table
from prefixwise.bench.render.numbers import short_number

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


class ClientProcess(Artifact):
    """What one process that sends requests did in a phase."""

    sent: int = Field(ge=0)
    cpu_sec: float = Field(ge=0)  # while it was sending
    wall_sec: float = Field(ge=0)
    busy_share: float = Field(ge=0)  # cpu_sec / wall_sec
    sender_late: Spread | None


class LoadPhase(Artifact):
    """All arrivals of one phase, and what became of them. Metrics are None where nothing was answered.

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
    client_limited: bool = False  # it sent too late or had no CPU left: the metrics are the client's, not the server's
    client_processes: list[ClientProcess] = Field(default_factory=list)  # none in older files
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


def check_load(result: LoadResult, found: Findings) -> None:
    """Check both phases."""
    for name, phase in (("warmup", result.warmup), ("measured", result.measured)):
        if phase is not None:
            _check_phase(name, phase, result.geometry.num_items, found)
    if result.measured.errors_by_code:
        found.warn("measured.errors_by_code", "none", result.measured.errors_by_code)
    if result.measured.dropped:
        found.warn("measured.dropped", "0", result.measured.dropped)
    if result.measured.client_limited:
        found.warn("measured.client_limited", "false", "true: the metrics are the client's")
    if result.cut_short:
        found.warn("cut_short", "false", "true")


def _check_phase(where: str, phase: LoadPhase, num_items: int, found: Findings) -> None:
    found.same(f"{where}.arrivals", phase.sent + phase.dropped, phase.arrivals, "sent + dropped")
    failed = sum(phase.errors_by_code.values())
    found.same(f"{where}.sent", phase.answered + failed, phase.sent, "answered + errors_by_code")
    name = "wall_sec" if phase.rate_sec is None else "rate_sec"
    seconds = phase.wall_sec if phase.rate_sec is None else phase.rate_sec
    if seconds > 0:
        rate = phase.answered / seconds
        found.close(f"{where}.qps_answered", rate, phase.qps_answered, f"answered / {name}")
        found.close(f"{where}.items_per_sec", rate * num_items, phase.items_per_sec, f"items answered / {name}")
    if phase.rate_sec is not None:
        _check_times(where, phase, phase.rate_sec, found)
    for name in ("latency", "service_latency", "sender_late"):
        _check_spread(f"{where}.{name}", getattr(phase, name), found)
    if phase.client_processes:
        sent = sum(client.sent for client in phase.client_processes)
        found.same(f"{where}.sent", sent, phase.sent, "sent by all client processes")
    if (phase.latency is None) != (phase.answered == 0):
        found.fail(f"{where}.latency", "metrics where something was answered, and only there", phase.latency)


def _check_times(where: str, phase: LoadPhase, rate_sec: float, found: Findings) -> None:
    found.close(f"{where}.drain_sec", phase.wall_sec - phase.send_sec, phase.drain_sec, "wall_sec - send_sec")
    if not phase.send_sec <= rate_sec <= phase.wall_sec:
        expected = f"from send_sec {phase.send_sec:.6g} to wall_sec {phase.wall_sec:.6g}"
        found.fail(f"{where}.rate_sec", expected, f"{rate_sec:.6g}")
    if phase.goodput is not None and rate_sec > 0:
        rate = phase.goodput.share_within_bound * phase.arrivals / rate_sec
        found.close(f"{where}.goodput.requests_per_sec", rate, phase.goodput.requests_per_sec, "in time / rate_sec")


def _check_spread(where: str, spread: Spread | None, found: Findings) -> None:
    if spread is None:
        return
    values = [spread.p50_ms, spread.p95_ms, spread.p99_ms, spread.max_ms]
    if values != sorted(values):
        found.fail(where, "p50 <= p95 <= p99 <= max", values)


LONG_DRAIN = 1.05  # of the time that rates are by


def metrics_table(caption: str, result: LoadResult) -> tuple[Block, ...]:
    """All metrics of one result."""
    return table(caption, ("metric", "value"), metrics_of(result), numeric=False)


def metrics_of(result: LoadResult) -> list[tuple[str, str]]:
    """The result for people: names and values, in the order of interest."""
    phase = result.measured
    rows = [
        ("sent", _sent_phrase(phase)),
        ("answered", _answered_phrase(phase)),
        ("items", f"{phase.items_per_sec:,.1f} items/s"),
        ("latency", _phrase(phase.latency)),
        ("service latency", _phrase(phase.service_latency)),
        ("sender late by", _phrase(phase.sender_late)),
        ("client overhead", _phrase(result.client_overhead)),
        ("errors", ", ".join(f"{code} {count:,}" for code, count in phase.errors_by_code.items()) or "none"),
        ("dropped", f"{phase.dropped:,}"),
    ]
    if phase.latency_with_failures is not None and phase.answered < phase.arrivals:
        rows.insert(4, ("latency of all", _latency_of_all_phrase(phase)))
    if phase.client_processes:
        rows.append(("client CPU", _client_phrase(phase.client_processes)))
    if phase.goodput is not None:
        rows.append(("goodput", _goodput_phrase(phase.goodput)))
    return rows


def _sent_phrase(phase: LoadPhase) -> str:
    phrase = f"{phase.sent:,} of {phase.arrivals:,} arrivals in {phase.send_sec:,.1f} s"
    return f"{phase.qps_sent:,.2f} requests/s: {phrase}"


def _answered_phrase(phase: LoadPhase) -> str:
    seconds = phase.wall_sec if phase.rate_sec is None else phase.rate_sec
    phrase = f"{phase.qps_answered:,.2f} requests/s: {phase.answered:,} in {seconds:,.1f} s"
    return f"{phrase}, the last after {phase.wall_sec:,.1f} s" if phase.wall_sec > seconds * LONG_DRAIN else phrase


def _phrase(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    names = ("p50", "p95", "p99", "max")
    return "  ".join(f"{name} {getattr(spread, f'{name}_ms'):,.1f}" for name in names) + "  ms"


def _client_phrase(clients: Sequence[ClientProcess]) -> str:
    """How busy each client process was."""
    shares = ", ".join(f"{client.busy_share:.0%}" for client in clients)
    return f"{len(clients)} process{'es' if len(clients) > 1 else ''}, {shares} busy while sending"


def _latency_of_all_phrase(phase: LoadPhase) -> str:
    """The percentiles over all arrivals, with those without scores."""
    waits = {name: getattr(phase.latency_with_failures, f"{name}_ms") for name in ("p50", "p95", "p99")}
    phrase = "  ".join(f"{name} {'never' if wait is None else f'{wait:,.1f}'}" for name, wait in waits.items())
    return f"{phrase}  ms, with the {phase.arrivals - phase.answered:,} that got no scores"


def _goodput_phrase(goodput: Goodput) -> str:
    verdict = "met" if goodput.bound_met else "NOT met"
    return (
        f"{goodput.requests_per_sec:,.2f} requests/s, {goodput.items_per_sec:,.1f} items/s within "
        f"{goodput.p99_bound_ms:,g} ms ({goodput.share_within_bound:.1%} of arrivals; p99 bound {verdict})"
    )


def load_title(results: Sequence[Named[LoadResult]]) -> str:
    """The section title; with the load where there is one result."""
    return f"Under load: {_shape(results[0].content)}" if len(results) == 1 else "Under load"


def _shape(result: LoadResult) -> str:
    """The load: requests in flight, or requests per second."""
    if result.mode == "closed":
        return f"{result.concurrency} in flight"
    return f"{short_number(result.rate_qps)} requests/s"


def load_blocks(results: Sequence[Named[LoadResult]]) -> tuple[Block, ...]:
    """Results side by side, then all metrics of each."""
    header = ("server", "load", "answered/s", "items/s", "p50 (ms)", "p95 (ms)", "p99 (ms)", "goodput/s", "errors")
    blocks: list[Block] = [
        Paragraph(
            "Open: requests arrive at random times at a rate. Closed: so many are in flight, each sent when one is "
            "answered. Latency counts from the intended send time; goodput is what was answered within the p99 bound."
        ),
        *table("Load side by side", header, [_load_cells(each) for each in results]),
    ]
    for each in results:
        shape = each.content.geometry
        of = f"{each.name}, {_shape(each.content)}" if len(results) > 1 else "Measured"
        size = f"{shape.query_tokens:,} query tokens, {shape.num_items:,} items of {shape.item_tokens:,} tokens"
        blocks += metrics_table(f"{of}: {size}", each.content)
        blocks += bullets(each.content.notes)
    return tuple(blocks)


def _load_cells(found: Named[LoadResult]) -> list[Cell | str]:
    result, phase = found.content, found.content.measured
    spread = phase.latency
    waits = [None] * 3 if spread is None else [spread.p50_ms, spread.p95_ms, spread.p99_ms]
    errors = [f"{code} {count}" for code, count in phase.errors_by_code.items()]
    errors += [f"dropped {phase.dropped}"] if phase.dropped else []
    goodput = NONE if phase.goodput is None else short_number(phase.goodput.requests_per_sec)
    return [
        found.name,
        f"{result.mode}, {_shape(result)}",
        short_number(phase.qps_answered),
        short_number(phase.items_per_sec),
        *map(short_number, waits),
        goodput,
        Cell(", ".join(errors), "bad") if errors else "none",
    ]


def backend_of_load(result: LoadResult) -> str | None:
    """The backend of the server; None where it does not report it."""
    return backend_name(result.server_config)
