"""Every gate beside the comparison's own: those of validation, of variants, of models. One that fails makes the whole
report a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixwise.bench.ab.report import problems_of
from prefixwise.bench.artifacts import AbResult, GateCheck, ModelMatrix, MultiVsSerial, Parity
from prefixwise.bench.report.document import NONE, Card
from prefixwise.bench.report.inputs import ExtraInputs
from prefixwise.bench.report.named import Named
from prefixwise.bench.report.numbers import difference, figure
from prefixwise.bench.validation.gates import judge
from prefixwise.bench.validation.options import GateBounds


@dataclass(frozen=True)
class Gate:
    """One figure against its bound, in words."""

    name: str
    value: str
    bound: str
    passed: bool


@dataclass(frozen=True)
class GateGroup:
    """The gates of one source; it has no name where it is the only one."""

    name: str
    gates: tuple[Gate, ...]


def gate_groups(inputs: ExtraInputs) -> list[GateGroup]:
    """All of them, in the order of the sections."""
    groups = [GateGroup(name, tuple(_gates(checks))) for name, checks in validation_checks(inputs).items()]
    groups += [GateGroup(f"variants by {each.content.compare}", _variant_gates(each.content)) for each in inputs.ab]
    groups += [GateGroup("models", _model_gates(each.content)) for each in inputs.model_matrix]
    return [group for group in groups if group.gates]


def validation_checks(inputs: ExtraInputs) -> dict[str, dict[str, GateCheck]]:
    """By source. A judgement that is given counts for the files of its name; others have the default bounds."""
    files: list[Named[MultiVsSerial] | Named[Parity]] = [*inputs.multi_vs_serial, *inputs.parity]
    if max(len(inputs.gate), len(inputs.multi_vs_serial), len(inputs.parity)) <= 1:
        return _of_one_source(inputs, files)
    found = {each.name: dict(each.content.checks) for each in inputs.gate}
    judged = set(found)
    for file in files:
        if file.name not in judged:
            found.setdefault(file.name, {}).update(_default_checks(file.content))
    return found


def _of_one_source(
    inputs: ExtraInputs, files: Sequence[Named[MultiVsSerial] | Named[Parity]]
) -> dict[str, dict[str, GateCheck]]:
    """One file of each kind at most: they belong together, whatever they are called."""
    checks: dict[str, GateCheck] = {}
    for file in files if not inputs.gate else ():
        checks.update(_default_checks(file.content))
    for gate in inputs.gate:
        checks.update(gate.content.checks)
    return {"": checks} if checks else {}


def _default_checks(content: MultiVsSerial | Parity) -> dict[str, GateCheck]:
    """Only those of the figures that this kind of file has."""
    kind = "parity" if isinstance(content, Parity) else "multi_vs_serial"
    figures = {"parity": {}, "multi_vs_serial": {}, kind: content.model_dump()}
    checks = judge(figures["multi_vs_serial"], figures["parity"], GateBounds()).checks
    return {name: check for name, check in checks.items() if check.field.partition(".")[0] == kind}


def _gates(checks: Mapping[str, GateCheck]) -> list[Gate]:
    return [
        Gate(
            name,
            figure(check.value) if check.comparison == ">=" else difference(check.value),
            f"{check.comparison} {check.bound:g}",
            check.passed,
        )
        for name, check in checks.items()
    ]


def _variant_gates(result: AbResult) -> tuple[Gate, ...]:
    """The first is what the others are compared with, so of it only a failure is told."""
    first, bound = result.variants[0].name, f"<= {result.correctness_thresholds.max_abs_diff:g}"
    gates = []
    for variant in result.variants:
        worked, scores = variant.status == "ok", variant.scores_vs_first
        value = "failed" if not worked else NONE if scores is None else difference(scores.max_abs_diff)
        if variant.name != first or not worked:
            name = f"scores of {variant.name} are those of {first}"
            gates.append(Gate(name, value, bound, worked and variant.scores_agree))
    return tuple(gates)


def _model_gates(matrix: ModelMatrix) -> tuple[Gate, ...]:
    """A model that is listed and has no row was not reached."""
    found = {row.model: row.status for row in matrix.rows}
    return tuple(
        Gate(model, found.get(model, "not run"), "pass", found.get(model) == "pass")
        for model in dict.fromkeys([*matrix.models, *found])
    )


def gate_failures(inputs: ExtraInputs) -> list[str]:
    """A sentence for each kind of gate of which some failed."""
    failed = [
        f"{source} {name}".strip()
        for source, checks in validation_checks(inputs).items()
        for name, check in checks.items()
        if not check.passed
    ]
    variants = [problem for each in inputs.ab for problem in _variant_problems(each.content)]
    models = [gate.name for each in inputs.model_matrix for gate in _model_gates(each.content) if not gate.passed]
    kinds = (("Validation gates", failed, ", "), ("Variants", variants, "; "), ("Models", models, ", "))
    return [f"{kind} FAILED: {between.join(found)}." for kind, found, between in kinds if found]


def _variant_problems(result: AbResult) -> list[str]:
    """In the words of `bench ab`; where it has none, the gate's own."""
    return problems_of(result) or [f"not the {gate.name}" for gate in _variant_gates(result) if not gate.passed]


def gates_card(inputs: ExtraInputs) -> tuple[Card, ...]:
    """Nothing where there are no gates."""
    gates = [gate for group in gate_groups(inputs) for gate in group.gates]
    if not gates:
        return ()
    failed = sum(not gate.passed for gate in gates)
    value = f"{failed} FAILED" if failed else "all passed"
    return (Card("Gates", value, f"{len(gates) - failed} of {len(gates)} passed", "bad" if failed else "good"),)
