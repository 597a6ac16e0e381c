"""What must hold in the results of `bench load` and `bench ab`: counts add up, figures follow from the runs."""

from __future__ import annotations

from prefixwise.bench.ab.intervals import geometric_mean, round_medians
from prefixwise.bench.artifacts import AbResult, AbVariant, CorrectnessThresholds, LoadPhase, LoadResult, Spread
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.rules import percentile


def check_load(result: LoadResult, found: Findings) -> None:
    """Both phases."""
    for name, phase in (("warmup", result.warmup), ("measured", result.measured)):
        if phase is not None:
            _check_phase(name, phase, result.geometry.num_items, found)
    if result.measured.errors_by_code:
        found.warn("measured.errors_by_code", "none", result.measured.errors_by_code)
    if result.measured.dropped:
        found.warn("measured.dropped", "0", result.measured.dropped)
    if result.measured.client_limited:
        found.warn("measured.client_limited", "false", "true: the figures are the client's")
    if result.cut_short:
        found.warn("cut_short", "false", "true")


def check_ab(result: AbResult, found: Findings) -> None:
    """Every variant."""
    names = [variant.name for variant in result.variants]
    for index, variant in enumerate(result.variants):
        where = f"variants[{index}]"
        if names.index(variant.name) != index:
            found.fail(f"{where}.name", "a name that no other variant has", variant.name)
        _check_variant(where, variant, result.geometry.num_items, found)
        _check_speed(where, variant, result.variants[0], found)
        _check_scores(where, variant, result.correctness_thresholds, found)
    if result.rounds == 1:
        found.warn("rounds", "several, for an interval", 1)
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
    if (phase.latency is None) != (phase.answered == 0):
        found.fail(f"{where}.latency", "figures where something was answered, and only there", phase.latency)


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


def _check_variant(where: str, variant: AbVariant, num_items: int, found: Findings) -> None:
    found.same(f"{where}.status", "failed" if variant.failure is not None else "ok", variant.status, "by failure")
    if variant.status == "failed":
        found.warn(f"{where}.status", "ok", f"failed: {variant.failure}")
        return
    if not variant.runs:
        found.fail(f"{where}.runs", "at least one run, as it is ok", "none")
        return
    seconds = [run.seconds for run in variant.runs]
    time, name = percentile(seconds, 50), "median"
    found.close(f"{where}.median_ms", time * 1000, variant.median_ms, "by its runs")
    found.close(f"{where}.p95_ms", percentile(seconds, 95) * 1000, variant.p95_ms, "by its runs")
    if variant.time_ms is not None and min(seconds) > 0:
        time, name = geometric_mean(round_medians(variant.runs)), "time"
        found.close(f"{where}.time_ms", time * 1000, variant.time_ms, "by its rounds")
    if time > 0:
        found.close(f"{where}.items_per_sec", num_items / time, variant.items_per_sec, f"items / {name}")


def _check_speed(where: str, variant: AbVariant, first: AbVariant, found: Findings) -> None:
    if variant.speed_vs_first is not None and variant.time_ms and first.time_ms:
        ratio = first.time_ms / variant.time_ms
        found.close(f"{where}.speed_vs_first.ratio", ratio, variant.speed_vs_first.ratio, "of the times")


def _check_scores(where: str, variant: AbVariant, bounds: CorrectnessThresholds, found: Findings) -> None:
    own = variant.scores_vs_first
    if own is None:
        found.same(f"{where}.scores_agree", False, variant.scores_agree, "nothing was compared")
        return
    agree = own.max_abs_diff <= bounds.max_abs_diff and own.mean_abs_diff <= bounds.mean_abs_diff
    why = f"by its differences {own.max_abs_diff:.6g} and {own.mean_abs_diff:.6g}"
    found.same(f"{where}.scores_agree", agree, variant.scores_agree, why)
    if not variant.scores_agree:
        found.warn(f"{where}.scores_agree", "true", "false")
