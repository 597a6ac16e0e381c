from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.validation.gates import failed_checks, judge, read_figures
from prefixwise.bench.validation.options import GateBounds
from prefixwise.contract.errors import ArtifactError

# Every figure at its bound.
MULTI_VS_SERIAL: dict[str, Any] = {
    "isolation": {"same_length_mutation_max_abs_diff": 0.0, "changed_length_mutation_max_abs_diff": 0.0},
    "equivalence_query_plus_delimiter": {"max_abs_diff": 0.02},
    "performance": {"8": {"speedup_vs_serial_p50": 1.5}, "32": {"speedup_vs_serial_p50": 3.0}},
}
PARITY = {"max_abs_diff_jax_serial_vs_torch_serial": 0.02}
BOTH = {"multi_vs_serial": MULTI_VS_SERIAL, "parity": PARITY}
# A check's name, where its figure is, and a figure that is just too far.
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


@pytest.mark.parametrize(
    ("content", "error"), [("{", "expected JSON"), ("[]", "expected an object, got list"), (None, "cannot be read")]
)
def test_a_file_without_figures_is_an_error(tmp_path: Path, content: str | None, error: str) -> None:
    path = tmp_path / "figures.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArtifactError, match=error):
        read_figures(path)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"any": [1]}))
    assert read_figures(path) == {"any": [1]}
