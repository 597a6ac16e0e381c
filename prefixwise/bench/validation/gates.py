"""The gates of `validate gate`: five figures, each against its bound.

The names are those of the earlier system's checker, and stay when a bound is another one; `bound` says what it was.
A figure that is not there fails its gate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prefixwise.bench.artifacts import GateCheck, GateReport
from prefixwise.bench.files import read_bytes
from prefixwise.bench.validation.options import GateBounds
from prefixwise.contract.errors import ArtifactError

Comparison = Literal["<=", ">="]


def judge(multi_vs_serial: Mapping[str, Any], parity: Mapping[str, Any], bounds: GateBounds) -> GateReport:
    """Takes them as they are in their files: one that lacks a figure is judged all the same."""
    both = {"multi_vs_serial": multi_vs_serial, "parity": parity}
    isolation, speedup = "multi_vs_serial.isolation", f"multi_vs_serial.performance.{bounds.speedup_items}"
    rules: dict[str, tuple[str, Comparison, float]] = {
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
    checks = {name: _check(both, *rule) for name, rule in rules.items()}
    return GateReport(checks=checks, all_pass=all(check.passed for check in checks.values()))


def failed_checks(report: GateReport) -> list[str]:
    """Their names."""
    return [name for name, check in report.checks.items() if not check.passed]


def read_figures(path: Path) -> dict[str, Any]:
    """A JSON object, whatever is in it. Raises ArtifactError."""
    try:
        found = json.loads(read_bytes(path))
    except ValueError:
        raise ArtifactError(f"{path} cannot be understood: expected JSON") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} cannot be understood: expected an object, got {type(found).__name__}")
    return found


def _check(both: Mapping[str, Any], field: str, comparison: Comparison, bound: float) -> GateCheck:
    found = _look_up(both, field)
    fault = _fault(found, comparison, bound)
    return GateCheck.model_validate(
        {
            "field": field,
            "value": float(found) if _is_number(found) else None,
            "comparison": comparison,
            "bound": bound,
            "pass": fault is None,
            "detail": None if fault is None else f"{field} {fault}",
        }
    )


def _fault(found: Any, comparison: Comparison, bound: float) -> str | None:
    """None where the figure is there and within its bound."""
    if found is None:
        return "is missing"
    if not _is_number(found):
        return f"is no finite number: {found!r}"
    if found < 0:
        return f"is negative: {found:g}"
    within = found <= bound if comparison == "<=" else found >= bound
    return None if within else f"is {found:g}, expected {comparison} {bound:g}"


def _look_up(content: Any, field: str) -> Any:
    """None where any part of the way is not there."""
    for part in field.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
