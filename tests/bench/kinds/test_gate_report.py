from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.kinds.gate_report import failed_checks, judge
from prefixwise.bench.options import GateBounds
from tests.bench.kinds.samples import check, gate_report, reported, warned

EQUIVALENCE = "checks__delimiter_aligned_equiv_le_0p02"


SPEEDUP = "checks__speedup_n32_ge_3x"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({f"{EQUIVALENCE}__value": 0.021}, "aligned_equiv_le_0p02.pass: expected False (0.021 <= 0.02), got True"),
        ({f"{SPEEDUP}__value": 2.9}, "checks.speedup_n32_ge_3x.pass: expected False (2.9 >= 3), got True"),
        ({f"{SPEEDUP}__value": None}, "checks.speedup_n32_ge_3x.pass: expected False (None >= 3), got True"),
        ({f"{EQUIVALENCE}__value": -0.1}, "aligned_equiv_le_0p02.pass: expected False (-0.1 <= 0.02), got True"),
        ({"all_pass": False}, "all_pass: expected True (by its checks), got False"),
    ],
)
def test_a_verdict_follows_from_figure_and_bound(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    (only,) = reported(check(tmp_path, "gate-report", **changes))
    assert only.endswith(error)


def test_a_gate_that_failed_is_a_warning_and_no_error(tmp_path: Path) -> None:
    failed = {f"{SPEEDUP}__value": 2.0, f"{SPEEDUP}__pass": False, f"{SPEEDUP}__detail": "too slow", "all_pass": False}
    report = check(tmp_path, "gate-report", **failed)
    assert report.is_valid
    assert warned(report) == ["checks.speedup_n32_ge_3x.pass: expected true, got false: too slow"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"all_pass": True}, "all_pass: expected False (not passed: large), got True"),
        ({"rows__0__status": "fail"}, "rows[0].status: expected pass (by its gates), got fail"),
        ({"rows__0__model": "other"}, "rows[0].model: expected one of tiny, large, got other"),
        ({"rows__0__gate__all_pass": False, "rows__0__status": "fail"}, "rows[0].gate.all_pass: expected True (by its"),
    ],
)
def test_a_model_has_the_status_of_its_gates(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert any(error in each for each in reported(check(tmp_path, "model-matrix", **changes)))


def test_models_that_are_missing_or_failed_are_odd(tmp_path: Path) -> None:
    assert warned(check(tmp_path, "model-matrix")) == ["rows[1].status: expected pass, got error: out of memory"]
    done = {"model": "tiny", "status": "pass", "reason": None, "gate": gate_report()}
    cut_short = check(tmp_path, "model-matrix", rows=[done])
    assert cut_short.is_valid
    assert warned(cut_short) == ["rows: expected a row for every model, got none for large"]
    claimed = check(tmp_path, "model-matrix", rows=[done], all_pass=True)
    assert reported(claimed) == ["all_pass: expected False (not passed: large), got True"]


def test_a_self_check_passes_with_all_its_steps(tmp_path: Path) -> None:
    report = check(tmp_path, "self-check")
    assert report.is_valid
    assert warned(report) == ["steps[1].status: expected 0, got 1: too slow"]
    claimed = check(tmp_path, "self-check", all_pass=True)
    assert reported(claimed) == ["all_pass: expected false, by its steps: gate, got True"]
    empty = check(tmp_path, "self-check", all_pass=True, steps=[])
    assert reported(empty) == ["all_pass: expected false, by its steps: there are none, got True"]
    assert check(tmp_path, "self-check", all_pass=True, steps__1__status=0).is_valid
    assert "complete: expected all steps, got False" in warned(check(tmp_path, "self-check", complete=False))


# Every metric at its bound.
MULTI_VS_SERIAL: dict[str, Any] = {
    "isolation": {"same_length_mutation_max_abs_diff": 0.0, "changed_length_mutation_max_abs_diff": 0.0},
    "equivalence_query_plus_delimiter": {"max_abs_diff": 0.02},
    "performance": {"8": {"speedup_vs_serial_p50": 1.5}, "32": {"speedup_vs_serial_p50": 3.0}},
}


PARITY = {"max_abs_diff_jax_serial_vs_torch_serial": 0.02}


BOTH = {"multi_vs_serial": MULTI_VS_SERIAL, "parity": PARITY}


# A check's name, where its metric is, and a metric that is just too far.
CHECKS = {
    "same_length_isolation_zero": ("multi_vs_serial.isolation.same_length_mutation_max_abs_diff", 1e-12),
    "changed_length_isolation_zero": ("multi_vs_serial.isolation.changed_length_mutation_max_abs_diff", 1e-12),
    "delimiter_aligned_equiv_le_0p02": ("multi_vs_serial.equivalence_query_plus_delimiter.max_abs_diff", 0.0200001),
    "speedup_n32_ge_3x": ("multi_vs_serial.performance.32.speedup_vs_serial_p50", 2.9999),
    "jax_serial_vs_torch_serial_le_0p02": ("parity.max_abs_diff_jax_serial_vs_torch_serial", 0.0200001),
}


def with_figure(field: str, value: object) -> tuple[dict[str, Any], dict[str, Any]]:
    changed: dict[str, Any] = deepcopy(BOTH)
    *way, last = field.split(".")
    place = changed
    for part in way:
        place = place[part]
    place[last] = value
    return changed["multi_vs_serial"], changed["parity"]


def test_figures_at_their_bounds_pass() -> None:
    report = judge(MULTI_VS_SERIAL, PARITY, GateBounds())
    assert list(report.checks) == list(CHECKS)
    assert [check.value for check in report.checks.values()] == [0.0, 0.0, 0.02, 3.0, 0.02]
    assert [check.bound for check in report.checks.values()] == [0.0, 0.0, 0.02, 3.0, 0.02]
    assert (report.all_pass, failed_checks(report)) == (True, [])
    assert report.model_dump(by_alias=True)["checks"]["speedup_n32_ge_3x"] == {
        "field": "multi_vs_serial.performance.32.speedup_vs_serial_p50",
        "value": 3.0,
        "comparison": ">=",
        "bound": 3.0,
        "pass": True,
        "detail": None,
    }


@pytest.mark.parametrize("name", CHECKS)
def test_a_figure_over_its_bound_fails_its_own_gate_only(name: str) -> None:
    field, too_far = CHECKS[name]
    report = judge(*with_figure(field, too_far), GateBounds())
    check = report.checks[name]
    assert (report.all_pass, failed_checks(report)) == (False, [name])
    assert (check.value, check.detail) == (
        too_far,
        f"{field} is {too_far:g}, expected {check.comparison} {check.bound:g}",
    )


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (None, "is missing"),
        ("0.0", "is no finite number: '0.0'"),
        (True, "is no finite number: True"),
        (float("nan"), "is no finite number: nan"),
        (float("inf"), "is no finite number: inf"),
        (-1.0, "is negative: -1"),
    ],
)
def test_a_figure_that_is_none_fails_its_gate_and_says_so(name: str, value: object, fault: str) -> None:
    field, _ = CHECKS[name]
    report = judge(*with_figure(field, value), GateBounds())
    assert failed_checks(report) == [name]
    assert report.checks[name].detail == f"{field} {fault}"


def test_nothing_at_all_fails_every_gate() -> None:
    report = judge({"isolation": None, "performance": []}, {}, GateBounds())
    assert failed_checks(report) == list(CHECKS)


def test_bounds_may_be_others() -> None:
    bounds = GateBounds(speedup_items=8, min_speedup=1.5, max_equivalence=0.01, max_parity=0.03)
    report = judge(MULTI_VS_SERIAL, PARITY, bounds)
    assert failed_checks(report) == ["delimiter_aligned_equiv_le_0p02"]
    assert report.checks["speedup_n32_ge_3x"].value == 1.5
    assert failed_checks(judge(MULTI_VS_SERIAL, PARITY, GateBounds(speedup_items=64))) == ["speedup_n32_ge_3x"]


def test_isolation_may_be_given_some_room() -> None:
    field, _ = CHECKS["same_length_isolation_zero"]
    bounds = GateBounds(max_same_length_isolation=0.25)
    assert judge(*with_figure(field, 0.25), bounds).all_pass
    assert not judge(*with_figure(field, 0.26), bounds).all_pass
