"""What must hold in the verdicts of `validate gate`, `models` and `self`: they follow from what stands beside them."""

from __future__ import annotations

from prefixwise.bench.artifacts import GateCheck, GateReport, ModelMatrix, ModelRow, SelfCheck
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.validation.gates import judge
from prefixwise.bench.validation.options import GateBounds

# As every report has them, also where there was nothing to judge.
_GATES = judge({}, {}, GateBounds()).checks


def check_gate_report(report: GateReport, found: Findings, where: str = "") -> None:
    """`where`: of a report that is part of another artifact."""
    for name, check in report.checks.items():
        expected, why = _is_within(check), f"{check.value} {check.comparison} {check.bound:g}"
        found.same(f"{where}checks.{name}.pass", expected, check.passed, why)
        if name in _GATES:
            found.same(f"{where}checks.{name}.comparison", _GATES[name].comparison, check.comparison, "of this gate")
        if not check.passed:
            found.warn(f"{where}checks.{name}.pass", "true", f"false: {check.detail}")
    missing = [name for name in _GATES if name not in report.checks]
    for name in missing:
        found.fail(f"{where}checks.{name}", "the gate: a figure that is missing fails it", "nothing")
    all_pass = not missing and all(check.passed for check in report.checks.values())
    found.same(f"{where}all_pass", all_pass, report.all_pass, "by its checks")


def check_model_matrix(matrix: ModelMatrix, found: Findings) -> None:
    """Every model has a row, and every row the status of its gates."""
    for index, row in enumerate(matrix.rows):
        _check_row(row, f"rows[{index}]", found)
        if row.model not in matrix.models:
            found.fail(f"rows[{index}].model", f"one of {', '.join(matrix.models)}", row.model)
    missing = [model for model in matrix.models if model not in {row.model for row in matrix.rows}]
    if missing:
        found.warn("rows", "a row for every model", f"none for {', '.join(missing)}")
    if matrix.all_pass:
        failed = [row.model for row in matrix.rows if row.status != "pass"]
        found.same("all_pass", not (failed or missing), True, f"not passed: {', '.join(failed + missing) or 'none'}")


def check_self_check(verdict: SelfCheck, found: Findings) -> None:
    """It cannot have passed where one of its commands did not."""
    failed = [step.title for step in verdict.steps if step.status != 0]
    if verdict.all_pass and (failed or not verdict.steps):
        found.fail("all_pass", f"false, by its steps: {', '.join(failed) or 'there are none'}", True)
    if not verdict.complete:
        found.warn("complete", "all steps", False)
    for index, step in enumerate(verdict.steps):
        if step.status != 0:
            found.warn(f"steps[{index}].status", "0", f"{step.status}: {step.detail}")


def _is_within(check: GateCheck) -> bool:
    if check.value is None or check.value < 0:
        return False
    return check.value <= check.bound if check.comparison == "<=" else check.value >= check.bound


def _check_row(row: ModelRow, where: str, found: Findings) -> None:
    if row.gate is not None:
        check_gate_report(row.gate, found, f"{where}.gate.")
        found.same(f"{where}.status", "pass" if row.gate.all_pass else "fail", row.status, "by its gates")
    if row.status != "pass":
        found.warn(f"{where}.status", "pass", f"{row.status}: {row.reason}")
