"""The gates of `validate gate`: five metrics, each against its bound.

The names are those of the earlier system's checker, and stay when a bound is another one; `bound` says what it was.
A missing metric fails its gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings, is_number
from prefixwise.bench.options import GateBounds
from prefixwise.bench.render.document import Block, judged, table
from prefixwise.bench.render.numbers import difference, short_number


class GateCheck(Artifact):
    """One metric against its bound; None where there is no metric."""

    field: str
    value: float | None
    comparison: Literal["<=", ">="]
    bound: float
    passed: bool = Field(alias="pass")
    detail: str | None

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)


class GateReport(Artifact):
    """`validate gate`."""

    checks: dict[str, GateCheck]
    all_pass: bool


Operator = Literal["<=", ">="]


def judge(multi_vs_serial: Mapping[str, Any], parity: Mapping[str, Any], bounds: GateBounds) -> GateReport:
    """Judge the contents of both files; a missing metric fails its gate."""
    both = {"multi_vs_serial": multi_vs_serial, "parity": parity}
    isolation, speedup = "multi_vs_serial.isolation", f"multi_vs_serial.performance.{bounds.speedup_items}"
    rules: dict[str, tuple[str, Operator, float]] = {
        "same_length_isolation_zero": (
            f"{isolation}.same_length_mutation_max_abs_diff",
            "<=",
            bounds.max_same_length_isolation,
        ),
        "changed_length_isolation_zero": (
            f"{isolation}.changed_length_mutation_max_abs_diff",
            "<=",
            bounds.max_changed_length_isolation,
        ),
        "delimiter_aligned_equiv_le_0p02": (
            "multi_vs_serial.equivalence_query_plus_delimiter.max_abs_diff",
            "<=",
            bounds.max_equivalence,
        ),
        "speedup_n32_ge_3x": (f"{speedup}.speedup_vs_serial_p50", ">=", bounds.min_speedup),
        "jax_serial_vs_torch_serial_le_0p02": (
            "parity.max_abs_diff_jax_serial_vs_torch_serial",
            "<=",
            bounds.max_parity,
        ),
    }
    checks = {name: check_metric(both, *rule) for name, rule in rules.items()}
    return GateReport(checks=checks, all_pass=all(check.passed for check in checks.values()))


@dataclass(frozen=True)
class Gate:
    """One metric against its bound, as text."""

    name: str
    value: str
    bound: str
    passed: bool


def gates_of(checks: Mapping[str, GateCheck]) -> list[Gate]:
    """The checks for people."""
    return [
        Gate(
            name,
            short_number(check.value) if check.comparison == ">=" else difference(check.value),
            f"{check.comparison} {check.bound:g}",
            check.passed,
        )
        for name, check in checks.items()
    ]


def gates_table(caption: str, gates: Sequence[Gate]) -> tuple[Block, ...]:
    """A row for each gate."""
    rows = [(gate.name, gate.value, gate.bound, judged(gate.passed)) for gate in gates]
    return table(caption, ("gate", "value", "bound", "result"), rows)


def failed_checks(report: GateReport) -> list[str]:
    """The names of the failed checks."""
    return [name for name, check in report.checks.items() if not check.passed]


def check_metric(content: Mapping[str, Any], field: str, comparison: Operator, bound: float) -> GateCheck:
    """The metric at a dotted path of the content against its bound; a missing one fails."""
    found = _look_up(content, field)
    fault = _fault(found, comparison, bound)
    return GateCheck.model_validate(
        {
            "field": field,
            "value": float(found) if is_number(found) else None,
            "comparison": comparison,
            "bound": bound,
            "pass": fault is None,
            "detail": None if fault is None else f"{field} {fault}",
        }
    )


def _fault(found: Any, comparison: Operator, bound: float) -> str | None:
    """The reason of a failure; None where the metric is within its bound."""
    if found is None:
        return "is missing"
    if not is_number(found):
        return f"is no finite number: {found!r}"
    if found < 0:
        return f"is negative: {found:g}"
    within = found <= bound if comparison == "<=" else found >= bound
    return None if within else f"is {found:g}, expected {comparison} {bound:g}"


def _look_up(content: Any, field: str) -> Any:
    """The value at a dotted path; None where a part is missing."""
    for part in field.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


# As every report has them, also where there was nothing to judge.
_GATES = judge({}, {}, GateBounds()).checks


def check_gate_report(report: GateReport, found: Findings, where: str = "") -> None:
    """`where`: of a report that is part of another artifact."""
    for name, check in report.checks.items():
        expected, why = is_within(check), f"{check.value} {check.comparison} {check.bound:g}"
        found.same(f"{where}checks.{name}.pass", expected, check.passed, why)
        if name in _GATES:
            found.same(f"{where}checks.{name}.comparison", _GATES[name].comparison, check.comparison, "of this gate")
        if not check.passed:
            found.warn(f"{where}checks.{name}.pass", "true", f"false: {check.detail}")
    missing = [name for name in _GATES if name not in report.checks]
    for name in missing:
        found.fail(f"{where}checks.{name}", "the gate: a metric that is missing fails it", "nothing")
    all_pass = not missing and all(check.passed for check in report.checks.values())
    found.same(f"{where}all_pass", all_pass, report.all_pass, "by its checks")


def is_within(check: GateCheck) -> bool:
    """Whether it must pass."""
    if check.value is None or check.value < 0:
        return False
    return check.value <= check.bound if check.comparison == "<=" else check.value >= check.bound
