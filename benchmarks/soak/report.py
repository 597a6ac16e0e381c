"""The report of a run, for the harness's renderer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from benchmarks.soak.charts import Plot, Series, time_chart
from benchmarks.soak.recording import Exchange, Recording, Sample
from benchmarks.soak.verdicts import MIB, Verdict, idle_by_life, is_explained, is_failure
from prefixwise.bench.render.document import (
    Block,
    Card,
    Cell,
    Chart,
    Charts,
    Code,
    Paragraph,
    Report,
    Section,
    bullets,
    judged,
    table,
)
from prefixwise.bench.render.numbers import milliseconds
from prefixwise.bench.rules import percentile

_BUCKETS = 60  # of the latency chart
_ENDINGS = {
    "hung_up": "the client left",
    "lost": "connection lost",
    "unreachable": "no connection",
    "unanswered": "no answer",
}


def soak_report(recording: Recording, verdicts: Sequence[Verdict]) -> Report:
    """Verdicts first, then what they are made of."""
    return Report(
        title="Soak",
        date=recording.date[:10],
        passed=all(each.passed for each in verdicts),
        statements=_statements(recording, verdicts),
        cards=_cards(recording),
        sections=(
            Section("Verdicts", _verdicts(verdicts)),
            Section("Over time", (Charts(_charts(recording)),)),
            Section("Requests", (*_kinds(recording), *_statuses(recording))),
            Section("Faults and restarts", _disruptions(recording)),
            Section("Processes", _lives(recording)),
            Section("Setup", _setup(recording)),
        ),
    )


def _statements(recording: Recording, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    failed = [each.name for each in verdicts if not each.passed]
    first = (
        f"{recording.seconds / 60:.0f} minutes of mixed traffic with {len(recording.disruptions)} faults and restarts: "
        f"{recording.num_begun:,} requests to {len(recording.lives)} processes, one after the other."
    )
    return first, f"Failed: {', '.join(failed)}." if failed else "Every promise was kept."


def _cards(recording: Recording) -> tuple[Card, ...]:
    scored = [each for each in recording.exchanges if each.status == 200]
    wrong = sum(not each.as_expected for each in scored)
    failed = [each for each in recording.exchanges if is_failure(each)]
    unexplained = sum(not is_explained(each, recording.disruptions) for each in failed)
    last_cpu = {sample.life: sample.cpu_seconds for sample in recording.samples}
    cores = sum(last_cpu.values()) / max(recording.seconds, 1.0)
    return (
        Card("wrong bits", f"{wrong:,}", f"in {len(scored):,} responses of status 200"),
        Card("unexplained errors", f"{unexplained:,}", f"{len(failed):,} within faults and restarts"),
        Card("faults and restarts", f"{len(recording.disruptions)}", f"{len(recording.lives)} processes"),
        Card("processor", f"{cores:.2f} cores", "the server's, on average"),
    )


def _verdicts(verdicts: Sequence[Verdict]) -> tuple[Block, ...]:
    rows = [(each.name, judged(each.passed), each.promise, each.found) for each in verdicts]
    against = [f"{each.name}: {case}" for each in verdicts if not each.passed for case in each.against]
    header = ("", "verdict", "promise", "found")
    return (*table("Promises, and what was found", header, rows, numeric=False), *bullets(against))


def _charts(recording: Recording) -> tuple[Chart, ...]:
    marks = "Red crosses: the process ended, by a signal or a fault. Grey circles: faults that it survived."
    mib = "mebibytes"
    plots: list[tuple[Plot, list[Series]]] = [
        (
            Plot("latency", "Latency of scoring requests", "milliseconds (log scale)", marks, is_log=True),
            _latency(recording),
        ),
        (
            Plot("memory", "Resident memory", mib, "A line for each process. Orange: without traffic."),
            _usage(recording, lambda each: each.rss / MIB),
        ),
        (
            Plot("files", "Open files and sockets", "file descriptors", "Orange: without traffic."),
            _usage(recording, lambda each: each.files),
        ),
        (
            Plot("threads", "Threads", "threads", "Orange: without traffic."),
            _usage(recording, lambda each: each.threads),
        ),
        (
            Plot("blocks", "KV blocks in use", "blocks", "Reserved, in use or pinned. Orange: without traffic."),
            _usage(recording, lambda each: each.used_blocks),
        ),
    ]
    return tuple(time_chart(plot, series, recording.disruptions, max(recording.seconds, 1.0)) for plot, series in plots)


def _usage(recording: Recording, value: Callable[[Sample], float]) -> list[Series]:
    lives: dict[int, list[Sample]] = defaultdict(list)
    for sample in recording.samples:
        lives[sample.life].append(sample)
    busy = [[(each.time, value(each)) for each in life if value(each) >= 0] for life in lives.values()]
    idle = [[(each.time, value(each)) for each in life] for life in idle_by_life(recording.samples).values()]
    return [Series("all samples", "jax", busy), Series("idle", "pytorch", idle)]


def _latency(recording: Recording) -> list[Series]:
    width = max(recording.seconds, 1.0) / _BUCKETS
    by_bucket: dict[int, list[float]] = defaultdict(list)
    for each in recording.exchanges:
        if _is_scored(each):
            by_bucket[int(each.begin / width)].append(1000 * (each.end - each.begin))
    buckets = sorted(by_bucket.items())
    return [
        Series(
            f"p{percent}", css, [[((number + 0.5) * width, percentile(found, percent)) for number, found in buckets]]
        )
        for percent, css in ((50, "jax"), (99, "pytorch"))
    ]


def _is_scored(exchange: Exchange) -> bool:
    """Does its time say something about the server, not about its client?"""
    return exchange.status == 200 and exchange.kind.startswith(("score", "rerank", "pairs", "generative"))


def _kinds(recording: Recording) -> tuple[Block, ...]:
    by_kind: dict[str, list[Exchange]] = defaultdict(list)
    for each in recording.exchanges:
        by_kind[each.kind].append(each)
    header = ("kind", "requests", "as expected", "429", "in faults and restarts", "against", "p50", "p99")
    rows = [(kind, *_kind_cells(by_kind[kind], recording)) for kind in sorted(by_kind)]
    return table("Requests by kind", header, rows)


def _kind_cells(found: Sequence[Exchange], recording: Recording) -> tuple[Cell | str, ...]:
    right = sum(each.as_expected for each in found)
    refused = sum(each.status == 429 and not each.as_expected for each in found)
    failed = [each for each in found if is_failure(each)]
    explained = sum(is_explained(each, recording.disruptions) for each in failed)
    against = len(found) - right - refused - explained
    times = [1000 * (each.end - each.begin) for each in found if each.as_expected]
    waits = [milliseconds(percentile(times, percent) if times else None) for percent in (50, 99)]
    return (
        *(f"{count:,}" for count in (len(found), right, refused, explained)),
        Cell(f"{against:,}", "bad") if against else "0",
        *waits,
    )


def _statuses(recording: Recording) -> tuple[Block, ...]:
    counts = Counter(
        f"{each.status} {each.code}".strip() if each.ending == "answered" else _ENDINGS[each.ending]
        for each in recording.exchanges
    )
    rows = [(name, f"{count:,}") for name, count in sorted(counts.items())]
    return table("Requests by how they ended", ("status and code", "requests"), rows)


def _disruptions(recording: Recording) -> tuple[Block, ...]:
    failed = [each for each in recording.exchanges if is_failure(each)]
    rows = [
        (
            f"{each.begin / 60:.1f} min",
            each.kind,
            judged(not each.failure),
            f"{sum(is_explained(one, [each]) for one in failed):,}",
            each.failure or each.found,
        )
        for each in recording.disruptions
    ]
    explanation = (
        "A fault that the process survives excuses no error, as the requests of the failed step run again; only NaN, "
        "which may be the model's own answer, is a 500. An end excuses 503, lost and refused connections until the "
        "next process is ready. A drain loses no request from before it."
    )
    header = ("at", "what", "verdict", "requests failed", "the server")
    return (Paragraph(explanation), *table("All of them", header, rows, numeric=False))


def _lives(recording: Recording) -> tuple[Block, ...]:
    idle = idle_by_life(recording.samples)
    rows = []
    for life in recording.lives:
        found = idle.get(life.number, [])
        end = recording.seconds if life.end is None else life.end
        memory = f"{found[0].rss / MIB:.0f} to {found[-1].rss / MIB:.0f} MiB" if found else "-"
        ready = "-" if life.ready is None else f"{life.ready - life.begin:.1f} s"
        status = "-" if life.status is None else str(life.status)
        rows.append(
            (str(life.number), f"{life.begin / 60:.1f} min", ready, f"{end - life.begin:.0f} s", status, memory)
        )
    header = ("process", "began", "ready after", "lived", "exit status", "idle memory, first to last")
    return table("One after the other", header, rows)


def _setup(recording: Recording) -> tuple[Block, ...]:
    return (
        Code(recording.command),
        Paragraph(f"{recording.machine}. {recording.versions}."),
        Paragraph(
            f"The model is Qwen3 of two layers, 512 wide, with random weights in float32. The reference has "
            f"{recording.reference_items:,} items, each scored alone, before any traffic. Client and server share the "
            "machine, perhaps with other work: latencies say that nothing stalls, not how fast the server is."
        ),
    )
