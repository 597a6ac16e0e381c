"""From calls to metrics: latency from the intended send time and from the actual one, rates, errors, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prefixwise.bench.kinds.load import ClientProcess, Goodput, LatencyOfAll, LoadPhase, Spread
from prefixwise.bench.rules import mean, percentile

DROPPED = "dropped"


_NEVER_MS = 1e12  # for whom waits for an answer that does not come; a number, so that percentiles may interpolate


_LATE_MS = 5.0


_LATE_SHARE = 0.1  # of the median service latency


_MOST_BUSY = 0.9  # of its time a client process may take CPU


_JUDGED_SEC = 1.0  # of sending; a burst that is shorter may take all of its time


_STRAGGLERS = 100  # of so many answers the last one is not waited for


_FEW_STRAGGLERS = 20  # from so many on it is one


_MOST_FASTEST = 0.1  # of the sending time: the most that the fastest answer may take off the time rates are by


_FEW = 100  # answers; of fewer a p99 is little more than the maximum


class Call(NamedTuple):
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


@dataclass(frozen=True)
class ClientUse:
    """What one client process did in a phase, and the CPU time that it took while it was sending."""

    calls: Sequence[Call]
    cpu_sec: float
    wall_sec: float


@dataclass(frozen=True)
class _Times:
    """The durations that rates are divided by."""

    schedule_sec: float
    send_sec: float
    rate_sec: float
    wall_sec: float


def spread_of(values_ms: Sequence[float]) -> Spread | None:
    """None where there are no values."""
    if not values_ms:
        return None
    p50, p95, p99 = (percentile(values_ms, percent) for percent in (50, 95, 99))
    return Spread(p50_ms=p50, p95_ms=p95, p99_ms=p99, max_ms=max(values_ms), mean_ms=mean(values_ms))


def summarise(
    calls: Sequence[Call],
    *,
    num_items: int,
    send_sec: float | None = None,
    bound_ms: float | None = None,
    clients: Sequence[ClientUse] = (),
) -> LoadPhase:
    """`send_sec`: how long requests were to arrive; left out for a closed loop, where answers decide that. `clients`:
    the processes that sent the calls.

    What the rates are of is in `LoadPhase`.
    """
    sent = [call for call in calls if call.failure != DROPPED]
    answered = [call for call in calls if call.failure is None]
    times = _times(sent, answered, send_sec)
    service, late = spread_of([call.service_ms for call in answered]), spread_of([call.late_ms for call in sent])
    processes = [_client_process(each) for each in clients]
    return LoadPhase(
        arrivals=len(calls),
        sent=len(sent),
        dropped=len(calls) - len(sent),
        answered=len(answered),
        errors_by_code=dict(sorted(Counter(call.failure for call in sent if call.failure is not None).items())),
        send_sec=times.send_sec,
        wall_sec=times.wall_sec,
        rate_sec=times.rate_sec,
        drain_sec=times.wall_sec - times.send_sec,
        qps_offered=_rate(len(calls), times.schedule_sec),
        qps_sent=_rate(len(sent), times.send_sec),
        qps_answered=_rate(len(answered), times.rate_sec),
        items_per_sec=_rate(len(answered) * num_items, times.rate_sec),
        latency=spread_of([call.latency_ms for call in answered]),
        latency_with_failures=_latency_of_all(calls),
        service_latency=service,
        sender_late=late,
        client_limited=_is_late(late, service) or any(map(_is_busy, processes)),
        client_processes=processes,
        goodput=None if bound_ms is None else _goodput(calls, bound_ms, times.rate_sec, num_items),
    )


def _times(sent: Sequence[Call], answered: Sequence[Call], schedule_sec: float | None) -> _Times:
    ends = sorted(call.done for call in answered)
    stragglers = max(len(ends) // _STRAGGLERS, len(ends) >= _FEW_STRAGGLERS)
    answered_sec = ends[-1 - stragglers] if ends else 0.0
    last_end = max((call.done for call in sent), default=0.0)
    if schedule_sec is None:
        seconds = answered_sec or last_end
        return _Times(seconds, seconds, seconds, max(seconds, last_end))
    send_sec = max([schedule_sec, *(call.sent for call in sent)])
    fastest = min((call.done - call.sent for call in answered), default=0.0)  # what every answer takes is no backlog
    behind_sec = answered_sec - min(fastest, send_sec * _MOST_FASTEST)
    return _Times(schedule_sec, send_sec, max(send_sec, behind_sec), max(send_sec, last_end))


def _client_process(use: ClientUse) -> ClientProcess:
    sent = [call for call in use.calls if call.failure != DROPPED]
    return ClientProcess(
        sent=len(sent),
        cpu_sec=use.cpu_sec,
        wall_sec=use.wall_sec,
        busy_share=_rate(use.cpu_sec, use.wall_sec),
        sender_late=spread_of([call.late_ms for call in sent]),
    )


def _is_busy(client: ClientProcess) -> bool:
    """Had it no CPU time left? A closed loop sends nothing late: there it is the only sign."""
    return client.wall_sec >= _JUDGED_SEC and client.busy_share > _MOST_BUSY


def _is_late(late: Spread | None, service: Spread | None) -> bool:
    """Did this machine send later than 5 ms or a tenth of the service latency, whichever is more, one time in a
    hundred? What sends late reads late, too, so the service latency is in doubt with the rest."""
    if late is None:
        return False
    return late.p99_ms > max(_LATE_MS, _LATE_SHARE * service.p50_ms if service is not None else 0.0)


def _waits(calls: Sequence[Call]) -> list[float]:
    return [call.latency_ms if call.failure is None else _NEVER_MS for call in calls]


def _latency_of_all(calls: Sequence[Call]) -> LatencyOfAll | None:
    if not calls:
        return None
    longest = max((call.latency_ms for call in calls if call.failure is None), default=0.0)
    found = [percentile(_waits(calls), percent) for percent in (50, 95, 99)]
    p50, p95, p99 = (None if wait > longest else wait for wait in found)
    return LatencyOfAll(p50_ms=p50, p95_ms=p95, p99_ms=p99)


def _goodput(calls: Sequence[Call], bound_ms: float, rate_sec: float, num_items: int) -> Goodput:
    waits = _waits(calls)
    in_time = sum(wait <= bound_ms for wait in waits)
    return Goodput(
        p99_bound_ms=bound_ms,
        requests_per_sec=_rate(in_time, rate_sec),
        items_per_sec=_rate(in_time * num_items, rate_sec),
        share_within_bound=in_time / len(calls) if calls else 0.0,
        bound_met=bool(calls) and percentile(waits, 99) <= bound_ms,
    )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def notes_of(measured: LoadPhase) -> list[str]:
    """Notes for a reader of the metrics."""
    notes = []
    if _is_late(measured.sender_late, measured.service_latency) and measured.sender_late is not None:
        notes.append(
            f"CLIENT LIMITED: this machine sent late (p99 {measured.sender_late.p99_ms:,.1f} ms): the metrics are the "
            "client's and not the server's"
        )
    busy = [client.busy_share for client in measured.client_processes if _is_busy(client)]
    if busy:
        notes.append(
            f"CLIENT LIMITED: {len(busy)} of {len(measured.client_processes)} client processes had no CPU time left "
            f"({max(busy):.0%} busy): the metrics are the client's and not the server's; give more --client-processes"
        )
    lost = measured.arrivals - measured.answered
    if lost:
        notes.append(f"{lost:,} of {measured.arrivals:,} arrivals got no scores; the percentiles are of the rest")
    if 0 < measured.answered < _FEW:
        notes.append(f"the p99 of {measured.answered} answers is little more than their maximum")
    return notes
