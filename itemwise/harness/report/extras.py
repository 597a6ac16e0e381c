"""Sections for what may be given beside the comparison: validation gates, variants, load."""

from __future__ import annotations

from collections.abc import Mapping

from itemwise.harness.ab.report import HEADERS, cells_of, problems_of
from itemwise.harness.artifacts import AbResult, GateCheck, LoadResult, MultiVsSerial, Parity
from itemwise.harness.load.stats import figures_of
from itemwise.harness.report.document import Block, Bullets, Cell, Paragraph, Section, judged, table
from itemwise.harness.report.inputs import ReportInputs
from itemwise.harness.report.numbers import difference, figure, ratio
from itemwise.harness.validation.gates import judge
from itemwise.harness.validation.options import GateBounds


def extra_sections(inputs: ReportInputs) -> tuple[Section, ...]:
    """Only those for which there is something."""
    sections = []
    if inputs.gate or inputs.multi_vs_serial or inputs.parity:
        sections.append(Section("Validation gates", _validation(inputs)))
    sections += [Section(f"Variants: {_versus(result)}", _variants(result)) for result in inputs.ab]
    sections += [Section(f"Under load: {_shape(result)}", _load(result)) for result in inputs.load]
    return tuple(sections)


def gate_checks(inputs: ReportInputs) -> Mapping[str, GateCheck]:
    """A judgement that is given counts; else the default bounds, for the figures whose file is given."""
    if inputs.gate is not None:
        return inputs.gate.checks
    given = {"multi_vs_serial": inputs.multi_vs_serial, "parity": inputs.parity}
    figures = {name: {} if each is None else each.model_dump() for name, each in given.items()}
    checks = judge(figures["multi_vs_serial"], figures["parity"], GateBounds()).checks
    return {name: check for name, check in checks.items() if given[check.field.partition(".")[0]] is not None}


def failed_gates(inputs: ReportInputs) -> list[str]:
    """Their names."""
    return [name for name, check in gate_checks(inputs).items() if not check.passed]


def _validation(inputs: ReportInputs) -> tuple[Block, ...]:
    checks = gate_checks(inputs)
    failed = len(failed_gates(inputs))
    words = f"{failed} of {len(checks)} gates FAILED." if failed else f"All {len(checks)} gates passed."
    rows: list[list[Cell | str]] = [
        [
            name,
            figure(check.value) if check.comparison == ">=" else difference(check.value),
            f"{check.comparison} {check.bound:g}",
            judged(check.passed),
        ]
        for name, check in checks.items()
    ]
    blocks: tuple[Block, ...] = (Paragraph(words), *table("Gates", ("gate", "value", "bound", "result"), rows))
    if inputs.multi_vs_serial is not None:
        blocks += _speedups(inputs.multi_vs_serial)
    return blocks if inputs.parity is None else blocks + _parity(inputs.parity)


def _speedups(found: MultiVsSerial) -> tuple[Block, ...]:
    rows = [
        [
            count,
            figure(each.multi_p50_sec * 1000),
            figure(each.serial_p50_sec * 1000),
            ratio(each.speedup_vs_serial_p50),
        ]
        for count, each in found.performance.items()
    ]
    header = ("items", "multi-item p50 (ms)", "serial p50 (ms)", "speed-up")
    return table(f"Multi-item against one by one, {found.model}", header, rows)


def _parity(found: Parity) -> tuple[Block, ...]:
    rows = [
        ["JAX serial against transformers", difference(found.max_abs_diff_jax_serial_vs_torch_serial)],
        ["JAX multi-item against transformers", difference(found.max_abs_diff_jax_multi_vs_torch_serial)],
        [
            "JAX multi-item against transformers on the same prompt",
            difference(found.max_abs_diff_jax_multi_vs_torch_multi_semantic),
        ],
    ]
    return table(f"Parity, {found.model}", ("scores", "max abs diff"), rows)


def _versus(result: AbResult) -> str:
    return " vs ".join(variant.name for variant in result.variants)


def _variants(result: AbResult) -> tuple[Block, ...]:
    shape, first = result.geometry, result.variants[0].name
    words = (
        f"{result.rounds} rounds of {result.runs_per_round} runs in turns; {shape.query_tokens:,} query tokens, "
        f"{shape.num_items:,} items of {shape.item_tokens:,} tokens; model {result.model or 'embedded'}. Speed is the "
        f"time of {first} over the variant's: more than 1 is faster than {first}."
    )
    rows: list[tuple[Cell | str, ...]] = []
    for variant in result.variants:
        *cells, scores = cells_of(variant)
        good = variant.status == "ok" and variant.scores_agree
        rows.append((*cells, Cell(scores, "good" if good else "bad")))
    return (
        Paragraph(words),
        *table(f"Compared by {result.compare}", HEADERS, rows),
        *_bullets([*problems_of(result), *result.notes]),
    )


def _shape(result: LoadResult) -> str:
    """Which load it was."""
    if result.mode == "closed":
        return f"{result.concurrency} in flight"
    return f"{figure(result.rate_qps)} requests/s"


def _load(result: LoadResult) -> tuple[Block, ...]:
    shape = result.geometry
    arrivals = "Poisson arrivals" if result.mode == "open" else "each request waits for the answer before it"
    words = (
        f"{shape.query_tokens:,} query tokens, {shape.num_items:,} items of {shape.item_tokens:,} tokens; {arrivals}. "
        "Latency counts from the intended send time."
    )
    rows = [list(row) for row in figures_of(result)]
    return (
        Paragraph(words),
        *table("Measured", ("figure", "value"), rows, numeric=False),
        *_bullets(result.notes),
    )


def _bullets(lines: list[str]) -> tuple[Block, ...]:
    return (Bullets(tuple(lines)),) if lines else ()
