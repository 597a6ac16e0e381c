"""What must hold in the results of `bench load` and `bench ab`: counts add up, figures follow from the runs."""

from __future__ import annotations

from itemwise.harness.artifacts import AbResult, AbVariant, CorrectnessThresholds, LoadPhase, LoadResult, Spread
from itemwise.harness.checks.findings import Findings
from itemwise.harness.rules import percentile


def check_load(result: LoadResult, found: Findings) -> None:
    """Both phases."""
    for name, phase in (("warmup", result.warmup), ("measured", result.measured)):
        if phase is not None:
            _check_phase(name, phase, result.geometry.num_items, found)
    if result.measured.errors_by_code:
        found.warn("measured.errors_by_code", "none", result.measured.errors_by_code)
    if result.measured.dropped:
        found.warn("measured.dropped", "0", result.measured.dropped)


def check_ab(result: AbResult, found: Findings) -> None:
    """Every variant."""
    names = [variant.name for variant in result.variants]
    for index, variant in enumerate(result.variants):
        where = f"variants[{index}]"
        if names.index(variant.name) != index:
            found.fail(f"{where}.name", "a name that no other variant has", variant.name)
        _check_variant(where, variant, result.geometry.num_items, found)
        _check_scores(where, variant, result.correctness_thresholds, found)
    if result.rounds == 1:
        found.warn("rounds", "several, for an interval", 1)


def _check_phase(where: str, phase: LoadPhase, num_items: int, found: Findings) -> None:
    found.same(f"{where}.arrivals", phase.sent + phase.dropped, phase.arrivals, "sent + dropped")
    failed = sum(phase.errors_by_code.values())
    found.same(f"{where}.sent", phase.answered + failed, phase.sent, "answered + errors_by_code")
    if phase.wall_sec > 0:
        rate = phase.answered / phase.wall_sec
        found.close(f"{where}.qps_answered", rate, phase.qps_answered, "answered / wall_sec")
        found.close(f"{where}.items_per_sec", rate * num_items, phase.items_per_sec, "items answered / wall_sec")
    for name in ("latency", "service_latency", "sender_late"):
        _check_spread(f"{where}.{name}", getattr(phase, name), found)
    if (phase.latency is None) != (phase.answered == 0):
        found.fail(f"{where}.latency", "figures where something was answered, and only there", phase.latency)


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
    median = percentile(seconds, 50)
    found.close(f"{where}.median_ms", median * 1000, variant.median_ms, "by its runs")
    found.close(f"{where}.p95_ms", percentile(seconds, 95) * 1000, variant.p95_ms, "by its runs")
    if median > 0:
        found.close(f"{where}.items_per_sec", num_items / median, variant.items_per_sec, "items / median")


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
