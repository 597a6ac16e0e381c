"""What a recording shows: each verdict is a function of it, with the promise in words and what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.soak.recording import Disruption, Exchange, Recording, Sample

MIB = 1 << 20
MOST_SHOWN = 6  # of the cases against a promise

# What an idle process may have more at the end of its life than at the beginning: pools of allocators, lazy threads.
MAX_RSS_GROWTH = 64 * MIB
MAX_FILES_GROWTH = 3
MAX_THREADS_GROWTH = 3
LEAST_SERVED = 0.75
_LEAST_IDLE_SAMPLES = 4  # of a life whose growth is judged
_REFUSED = 429  # a documented answer to any request that is scored


@dataclass(frozen=True)
class Verdict:
    """`found` is a sentence for people; `against` has the first cases against the promise."""

    name: str
    promise: str
    passed: bool
    found: str
    against: tuple[str, ...] = ()


def judge(recording: Recording) -> list[Verdict]:
    """All verdicts, in the order of the report."""
    return [
        bits(recording),
        errors(recording),
        answers(recording),
        endings(recording),
        coverage(recording),
        faults(recording),
        *growth(recording),
        left_behind(recording),
    ]


def bits(recording: Recording) -> Verdict:
    """Every response of status 200 has the scores of its items alone."""
    answered = [each for each in recording.exchanges if each.status == 200]
    wrong = [each for each in answered if not each.as_expected]
    found = f"{len(answered):,} responses of status 200, {len(wrong):,} of them wrong"
    promise = "every score is that of its item alone, bit for bit"
    return Verdict("bits", promise, bool(answered) and not wrong, found, _cases(wrong))


def errors(recording: Recording) -> Verdict:
    """No 5xx and no lost connection without a cause."""
    failed = [each for each in recording.exchanges if is_failure(each)]
    unexplained = [each for each in failed if not is_explained(each, recording.disruptions)]
    found = f"{len(failed):,} in {len(recording.disruptions)} faults and restarts, {len(unexplained):,} at other times"
    promise = "a 5xx or a lost connection only while a fault or a restart explains it"
    return Verdict("errors", promise, not unexplained, found, _cases(unexplained))


def is_failure(exchange: Exchange) -> bool:
    """Is it the server's fault?"""
    is_lost = exchange.ending in ("lost", "unreachable")
    return is_lost or (exchange.status >= 500 and not exchange.as_expected)


def is_explained(exchange: Exchange, disruptions: Iterable[Disruption]) -> bool:
    """Does a fault or restart at that time excuse it?"""
    name = str(exchange.status) if exchange.ending == "answered" else exchange.ending
    for each in disruptions:
        is_then = exchange.begin <= each.end and exchange.end >= each.begin
        is_spared = each.spares_earlier and exchange.begin < each.begin and name != "503"
        if is_then and not is_spared and name in each.excuses:
            return True
    return False


def answers(recording: Recording) -> Verdict:
    """Every other response is the documented one."""
    others = [
        each
        for each in recording.exchanges
        if not (each.as_expected or is_failure(each) or each.status == 200 or each.status == _REFUSED)
        and each.ending != "unanswered"
    ]
    refused = sum(each.status == _REFUSED for each in recording.exchanges)
    expected = sum(each.as_expected and each.status >= 400 for each in recording.exchanges)
    found = f"{expected:,} errors as documented, {refused:,} refused by the full queue, {len(others):,} others"
    promise = "a wrong request gets its own error, a right one scores or 429"
    return Verdict("answers", promise, not others, found, _cases(others))


def endings(recording: Recording) -> Verdict:
    """None is lost by the server without an end."""
    unanswered = [each for each in recording.exchanges if each.ending == "unanswered"]
    missing = recording.num_begun - len(recording.exchanges)
    found = f"{recording.num_begun:,} begun, {missing:,} without a record, {len(unanswered):,} without an answer"
    promise = "every request ends"
    return Verdict("endings", promise, not unanswered and not missing, found, _cases(unanswered))


def coverage(recording: Recording) -> Verdict:
    """A server that refuses everything would break no other promise."""
    kinds = sorted({each.kind for each in recording.exchanges})
    served = {each.kind for each in recording.exchanges if each.as_expected}
    ends = [each for each in recording.disruptions if each.is_end]
    calm = [
        each for each in recording.exchanges if not any(each.begin <= one.end and each.end >= one.begin for one in ends)
    ]
    share = sum(each.as_expected for each in calm) / max(1, len(calm))
    missing = [kind for kind in kinds if kind not in served]
    found = f"{share:.1%} of {len(calm):,} requests between restarts; {len(served)} of {len(kinds)} kinds at least once"
    promise = f"{LEAST_SERVED:.0%} get what they asked for, beside bursts beyond the queue; every kind does"
    return Verdict("service", promise, bool(kinds) and not missing and share >= LEAST_SERVED, found, tuple(missing))


def faults(recording: Recording) -> Verdict:
    """Each did what the documentation says."""
    failed = tuple(
        f"{each.kind} at {each.begin:.0f} s: {each.failure}" for each in recording.disruptions if each.failure
    )
    found = f"{len(recording.disruptions)} faults and restarts, {len(failed)} not as documented"
    promise = "work goes on, or the process ends with its exit status and starts again"
    return Verdict("faults", promise, bool(recording.disruptions) and not failed, found, failed[:MOST_SHOWN])


def growth(recording: Recording) -> list[Verdict]:
    """Of every process with enough idle samples: its last tenth against its first."""
    lives = [each for each in idle_by_life(recording.samples).values() if len(each) >= _LEAST_IDLE_SAMPLES]
    limits = (("rss", "memory", MAX_RSS_GROWTH), ("files", "open files", MAX_FILES_GROWTH))
    return [_growth(lives, *limit) for limit in (*limits, ("threads", "threads", MAX_THREADS_GROWTH))]


def _growth(lives: Sequence[Sequence[Sample]], field: str, name: str, limit: int) -> Verdict:
    def show(value: float) -> str:
        return f"{value / MIB:+.1f} MiB" if field == "rss" else f"{value:+g}"

    grown = {each[0].life: grown_by([getattr(sample, field) for sample in each]) for each in lives}
    too_much = tuple(f"process {life}: {show(value)}" for life, value in grown.items() if value > limit)
    most = f"most: {show(max(grown.values()))}" if grown else f"none has {_LEAST_IDLE_SAMPLES} idle samples"
    promise = f"an idle process has at most {show(limit)} more in its last tenth than in its first, once it is warm"
    return Verdict(name, promise, bool(grown) and not too_much, f"{len(grown)} processes, {most}", too_much)


def grown_by(values: Sequence[float]) -> float:
    """The median of the last tenth less that of the first, after a fifth to warm up. A tenth has at least one value."""
    values = values[len(values) // 5 :]
    tenth = max(1, len(values) // 10)
    return median(values[-tenth:]) - median(values[:tenth])


def idle_by_life(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """The samples without traffic."""
    found: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.is_idle:
            found[sample.life].append(sample)
    return found


def left_behind(recording: Recording) -> Verdict:
    """An idle server holds nothing."""
    idle = [sample for sample in recording.samples if sample.is_idle]
    busy = [each for each in idle if each.used_blocks or each.pinned_blocks or each.requests]
    against = tuple(
        f"at {each.time:.0f} s: {each.used_blocks} blocks, {each.pinned_blocks} pinned, {each.requests} requests"
        for each in busy[:MOST_SHOWN]
    )
    promise = "an idle server has no KV block in use, no pin and no request"
    found = f"{len(idle)} idle samples, {len(busy)} with something left"
    return Verdict("left behind", promise, bool(idle) and not busy, found, against)


def _cases(exchanges: Sequence[Exchange]) -> tuple[str, ...]:
    return tuple(
        f"{each.kind}, {each.begin:.2f} to {each.end:.2f} s: {each.ending} {each.status} {each.code} {each.detail}"
        for each in exchanges[:MOST_SHOWN]
    )
