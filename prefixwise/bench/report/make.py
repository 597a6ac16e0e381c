"""The report of a comparison of two backends: which sections there are, in which order."""

from __future__ import annotations

from prefixwise.bench.report.agreement import agreement
from prefixwise.bench.report.checks import correctness_gates, stability, unsteady
from prefixwise.bench.report.comparison import cards, native_table, portable_table, statements
from prefixwise.bench.report.document import Block, Bullets, Figure, Figures, Report, Section
from prefixwise.bench.report.extras import extra_sections
from prefixwise.bench.report.figures import p95_figure, throughput_figure
from prefixwise.bench.report.findings import better_and_worse
from prefixwise.bench.report.gates import gate_failures, gates_card
from prefixwise.bench.report.inputs import ReportInputs
from prefixwise.bench.report.run_figures import latency_figures
from prefixwise.bench.report.score_figures import item_figure, size_figure
from prefixwise.bench.report.setup import commands, setup

TITLE = "JAX vs PyTorch: multi-item scoring"


def make_report(inputs: ReportInputs, title_date: str) -> Report:
    """Sections appear only for what is given."""
    comparison = inputs.comparison
    notes = (*comparison.notes, *inputs.notes)
    sections = (
        Section(
            "Same client, side by side",
            (*_figures(throughput_figure(comparison), p95_figure(comparison)), *portable_table(comparison)),
        ),
        Section("Each at its best", (*_figures(*latency_figures(inputs)), *native_table(comparison))),
        Section("Where JAX is better and worse, and by how much", better_and_worse(comparison)),
        Section(
            "Do the scores agree?",
            (*_figures(item_figure(inputs), size_figure(comparison)), *correctness_gates(comparison)),
        ),
        Section("Stability", stability(inputs)),
        *extra_sections(inputs),
        *((Section("Notes", (Bullets(notes),)),) if notes else ()),
        Section("Set-up", setup(inputs)),
        Section("Run it again", commands(inputs, title_date)),
    )
    return Report(
        title=TITLE,
        date=title_date,
        passed=_passed(inputs),
        statements=_statements(inputs),
        cards=(*cards(inputs), *gates_card(inputs)),
        sections=sections,
    )


def _passed(inputs: ReportInputs) -> bool | None:
    """None: nothing failed, but that the scores agree was not seen."""
    state = agreement(inputs.comparison)
    if state == "differ" or gate_failures(inputs):
        return False
    return True if state == "agree" else None


def _statements(inputs: ReportInputs) -> tuple[str, ...]:
    found = (*statements(inputs), *gate_failures(inputs), unsteady(inputs.distinct_matrices()))
    return tuple(filter(None, found))


def _figures(*found: Figure | None) -> tuple[Block, ...]:
    there = tuple(each for each in found if each is not None)
    return (Figures(there),) if there else ()
