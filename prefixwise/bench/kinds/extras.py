"""What a report may show beside a comparison, or alone: validation gates, variants, load, models.

One gate that fails makes the whole report a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixwise.bench.kinds.ab import AbResult, problems_of, variant_blocks, variant_titles
from prefixwise.bench.kinds.base import Artifact, date_of
from prefixwise.bench.kinds.gate_report import Gate, GateCheck, GateReport, gates_of, gates_table, judge
from prefixwise.bench.kinds.load import LoadResult, load_blocks, load_title
from prefixwise.bench.kinds.model_matrix import ModelMatrix, model_blocks
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial, speedup_table
from prefixwise.bench.kinds.named import Named
from prefixwise.bench.kinds.parity import Parity, parity_table
from prefixwise.bench.kinds.quantization import QuantizationCheck, quantization_blocks
from prefixwise.bench.options import GateBounds
from prefixwise.bench.render.document import NONE, Block, Card, Paragraph, Report, Section
from prefixwise.bench.render.numbers import difference


@dataclass(frozen=True, kw_only=True)
class ExtraInputs:
    """Artifacts for a report beside a comparison, or without one."""

    multi_vs_serial: Sequence[Named[MultiVsSerial]] = ()
    parity: Sequence[Named[Parity]] = ()
    gate: Sequence[Named[GateReport]] = ()
    ab: Sequence[Named[AbResult]] = ()
    load: Sequence[Named[LoadResult]] = ()
    model_matrix: Sequence[Named[ModelMatrix]] = ()
    quantization: Sequence[Named[QuantizationCheck]] = ()


@dataclass(frozen=True)
class GateGroup:
    """The gates of one source; it has no name where it is the only one."""

    name: str
    gates: tuple[Gate, ...]


def gate_groups(inputs: ExtraInputs) -> list[GateGroup]:
    """All gates, in the order of the sections."""
    groups = [GateGroup(name, tuple(gates_of(checks))) for name, checks in validation_checks(inputs).items()]
    groups += [GateGroup(f"variants by {each.content.compare}", _variant_gates(each.content)) for each in inputs.ab]
    groups += [GateGroup("models", _model_gates(each.content)) for each in inputs.model_matrix]
    groups += [GateGroup(each.content.model, tuple(gates_of(each.content.checks))) for each in inputs.quantization]
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
    """The checks of the metrics in this kind of file, by the default bounds."""
    kind = "parity" if isinstance(content, Parity) else "multi_vs_serial"
    metrics = {"parity": {}, "multi_vs_serial": {}, kind: content.model_dump()}
    checks = judge(metrics["multi_vs_serial"], metrics["parity"], GateBounds()).checks
    return {name: check for name, check in checks.items() if check.field.partition(".")[0] == kind}


def _variant_gates(result: AbResult) -> tuple[Gate, ...]:
    """Gates of all variants but the first, which is the baseline: of it only a failure counts."""
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
    """One gate per model; a listed model without a row was not run."""
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
    quantised = [
        f"{each.content.model} {name}"
        for each in inputs.quantization
        for name, check in each.content.checks.items()
        if not check.passed
    ]
    kinds = (
        ("Validation gates", failed, ", "),
        ("Variants", variants, "; "),
        ("Models", models, ", "),
        ("Quantised models", quantised, ", "),
    )
    return [f"{kind} FAILED: {between.join(found)}." for kind, found, between in kinds if found]


def _variant_problems(result: AbResult) -> list[str]:
    """The messages of `bench ab`, or else of the failed gates."""
    return problems_of(result) or [f"not the {gate.name}" for gate in _variant_gates(result) if not gate.passed]


def gates_card(inputs: ExtraInputs) -> tuple[Card, ...]:
    """A card of all gates; empty without gates."""
    gates = [gate for group in gate_groups(inputs) for gate in group.gates]
    if not gates:
        return ()
    failed = sum(not gate.passed for gate in gates)
    value = f"{failed} FAILED" if failed else "all passed"
    return (Card("Gates", value, f"{len(gates) - failed} of {len(gates)} passed", "bad" if failed else "good"),)


def extra_sections(inputs: ExtraInputs) -> tuple[Section, ...]:
    """A section for each kind of artifact that is given."""
    sections = []
    gates = _validation(inputs)
    if gates:
        sections.append(Section("Validation gates", gates))
    sections += [
        Section(f"Variants: {title}", variant_blocks(each.content)) for title, each in variant_titles(inputs.ab)
    ]
    if inputs.load:
        sections.append(Section(load_title(inputs.load), load_blocks(inputs.load)))
    sections += [Section("Models", model_blocks(each.content)) for each in inputs.model_matrix]
    sections += [
        Section(f"Quantisation: {each.content.model}", quantization_blocks(each.content))
        for each in inputs.quantization
    ]
    return tuple(sections)


def _validation(inputs: ExtraInputs) -> tuple[Block, ...]:
    groups = gate_groups(inputs)
    every = [gate for group in groups for gate in group.gates]
    failed = sum(not gate.passed for gate in every)
    phrase = f"{failed} of {len(every)} gates FAILED." if failed else f"All {len(every)} gates passed."
    blocks: list[Block] = [Paragraph(phrase)] if every else []
    for group in groups:
        blocks += gates_table(f"Gates: {group.name}" if group.name else "Gates", group.gates)
    for multi in inputs.multi_vs_serial:
        blocks += speedup_table(multi, several=len(inputs.multi_vs_serial) > 1)
    for parity in inputs.parity:
        blocks += parity_table(parity, several=len(inputs.parity) > 1)
    return tuple(blocks)


def extras_report(artifact: Artifact, name: str) -> Report:
    """Of one artifact alone; `name`: of its file."""
    title, inputs = _as_extra(artifact, Path(name).stem)
    failures = tuple(gate_failures(inputs))
    statements = failures or (f"{title}: nothing in it failed.",)
    return Report(title, date_of(artifact), not failures, statements, (), extra_sections(inputs))


def _as_extra(artifact: Artifact, name: str) -> tuple[str, ExtraInputs]:
    match artifact:
        case MultiVsSerial():
            return "Multi-item against one by one", ExtraInputs(multi_vs_serial=[Named(name, artifact)])
        case Parity():
            return "Parity with transformers", ExtraInputs(parity=[Named(name, artifact)])
        case GateReport():
            return "Validation gates", ExtraInputs(gate=[Named(name, artifact)])
        case AbResult():
            return "Variants", ExtraInputs(ab=[Named(name, artifact)])
        case LoadResult():
            return "Under load", ExtraInputs(load=[Named(name, artifact)])
        case ModelMatrix():
            return "Models", ExtraInputs(model_matrix=[Named(name, artifact)])
        case QuantizationCheck():
            return "A quantised model against a reference", ExtraInputs(quantization=[Named(name, artifact)])
        case _:
            raise AssertionError(f"no report is made of {type(artifact).__name__}")
