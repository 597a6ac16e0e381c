"""From calls to figures: latency from the intended send time and from the actual one, rates, errors, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from itemwise.harness.artifacts import Goodput, LoadPhase, LoadResult, Spread
from itemwise.harness.rules import mean, percentile

DROPPED = "dropped"
_NEVER_MS = 1e12  # for whom waits for an answer that does not come; a number, so that percentiles may interpolate
_LATE_MS = 5.0
_FEW = 100  # answers; of fewer a p99 is little more than the maximum


@dataclass(frozen=True)
class Call:
    """One arrival. Times are seconds since its phase began."""

    intended: float
    sent: float
    done: float
    failure: str | None = None  # the server's error code, ours where it gave none, or DROPPED

    @property
    def latency_ms(self) -> float:
        return (self.done - self.intended) * 1000

    @property
    def service_ms(self) -> float:
        return (self.done - self.sent) * 1000

    @property
    def late_ms(self) -> float:
        return max(0.0, self.sent - self.intended) * 1000


def spread_of(values_ms: Sequence[float]) -> Spread | None:
    """None where there are no values."""
    if not values_ms:
        return None
    p50, p95, p99 = (percentile(values_ms, percent) for percent in (50, 95, 99))
    return Spread(p50_ms=p50, p95_ms=p95, p99_ms=p99, max_ms=max(values_ms), mean_ms=mean(values_ms))


def summarise(
    calls: Sequence[Call], *, num_items: int, send_sec: float | None = None, bound_ms: float | None = None
) -> LoadPhase:
    """`send_sec`: how long requests were to arrive; until the last was answered when left out."""
    wall_sec = max([send_sec or 0.0, *(call.done for call in calls)])
    send_sec = wall_sec if send_sec is None else send_sec
    sent = [call for call in calls if call.failure != DROPPED]
    answered = [call for call in calls if call.failure is None]
    return LoadPhase(
        arrivals=len(calls),
        sent=len(sent),
        dropped=len(calls) - len(sent),
        answered=len(answered),
        errors_by_code=dict(sorted(Counter(call.failure for call in sent if call.failure is not None).items())),
        send_sec=send_sec,
        wall_sec=wall_sec,
        qps_offered=_rate(len(calls), send_sec),
        qps_sent=_rate(len(sent), send_sec),
        qps_answered=_rate(len(answered), wall_sec),
        items_per_sec=_rate(len(answered) * num_items, wall_sec),
        latency=spread_of([call.latency_ms for call in answered]),
        service_latency=spread_of([call.service_ms for call in answered]),
        sender_late=spread_of([call.late_ms for call in sent]),
        goodput=None if bound_ms is None else _goodput(calls, bound_ms, wall_sec, num_items),
    )


def _goodput(calls: Sequence[Call], bound_ms: float, wall_sec: float, num_items: int) -> Goodput:
    waits = [call.latency_ms if call.failure is None else _NEVER_MS for call in calls]
    in_time = sum(wait <= bound_ms for wait in waits)
    return Goodput(
        p99_bound_ms=bound_ms,
        requests_per_sec=_rate(in_time, wall_sec),
        items_per_sec=_rate(in_time * num_items, wall_sec),
        share_within_bound=in_time / len(calls) if calls else 0.0,
        bound_met=bool(calls) and percentile(waits, 99) <= bound_ms,
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def notes_of(measured: LoadPhase) -> list[str]:
    """What a reader of the figures should know."""
    notes = []
    lost = measured.arrivals - measured.answered
    if lost:
        notes.append(f"{lost} of {measured.arrivals} arrivals got no scores; the percentiles are of the others")
    if 0 < measured.answered < _FEW:
        notes.append(f"the p99 of {measured.answered} answers is little more than their maximum")
    if measured.sender_late is not None and measured.sender_late.p99_ms > _LATE_MS:
        late = measured.sender_late.p99_ms
        notes.append(f"this machine sent late (p99 {late:.1f} ms); the latency counts it, the service latency does not")
    return notes


def figures_of(result: LoadResult) -> list[tuple[str, str]]:
    """The result for people: names and values, in the order of interest."""
    phase = result.measured
    rows = [
        (
            "sent",
            f"{phase.qps_sent:.2f} requests/s: {phase.sent} of {phase.arrivals} arrivals in {phase.send_sec:.1f} s",
        ),
        ("answered", f"{phase.qps_answered:.2f} requests/s: {phase.answered} in {phase.wall_sec:.1f} s"),
        ("items", f"{phase.items_per_sec:.1f} items/s"),
        ("latency", _in_words(phase.latency)),
        ("service latency", _in_words(phase.service_latency)),
        ("sender late by", _in_words(phase.sender_late)),
        ("client overhead", _in_words(result.client_overhead)),
        ("errors", ", ".join(f"{code} {count}" for code, count in phase.errors_by_code.items()) or "none"),
        ("dropped", str(phase.dropped)),
    ]
    if phase.goodput is not None:
        rows.append(("goodput", _goodput_in_words(phase.goodput)))
    return rows


def _in_words(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    names = ("p50", "p95", "p99", "max")
    return "  ".join(f"{name} {getattr(spread, f'{name}_ms'):.1f}" for name in names) + "  ms"


def _goodput_in_words(goodput: Goodput) -> str:
    verdict = "met" if goodput.bound_met else "NOT met"
    return (
        f"{goodput.requests_per_sec:.2f} requests/s, {goodput.items_per_sec:.1f} items/s within "
        f"{goodput.p99_bound_ms:g} ms ({goodput.share_within_bound:.1%} of arrivals; p99 bound {verdict})"
    )
