from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.checks.samples import check, gate_report, told, warned

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
    (only,) = told(check(tmp_path, "gate-report", **changes))
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
    assert any(error in each for each in told(check(tmp_path, "model-matrix", **changes)))


def test_models_that_are_missing_or_failed_are_odd(tmp_path: Path) -> None:
    assert warned(check(tmp_path, "model-matrix")) == ["rows[1].status: expected pass, got error: out of memory"]
    done = {"model": "tiny", "status": "pass", "reason": None, "gate": gate_report()}
    cut_short = check(tmp_path, "model-matrix", rows=[done])
    assert cut_short.is_valid
    assert warned(cut_short) == ["rows: expected a row for every model, got none for large"]
    claimed = check(tmp_path, "model-matrix", rows=[done], all_pass=True)
    assert told(claimed) == ["all_pass: expected False (not passed: large), got True"]


def test_a_self_check_passes_with_all_its_steps(tmp_path: Path) -> None:
    report = check(tmp_path, "self-check")
    assert report.is_valid
    assert warned(report) == ["steps[1].status: expected 0, got 1: too slow"]
    claimed = check(tmp_path, "self-check", all_pass=True)
    assert told(claimed) == ["all_pass: expected false, by its steps: gate, got True"]
    empty = check(tmp_path, "self-check", all_pass=True, steps=[])
    assert told(empty) == ["all_pass: expected false, by its steps: there are none, got True"]
    assert check(tmp_path, "self-check", all_pass=True, steps__1__status=0).is_valid
    assert "complete: expected all steps, got False" in warned(check(tmp_path, "self-check", complete=False))
