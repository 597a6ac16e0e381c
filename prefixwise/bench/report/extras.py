"""Sections for what may be given beside the comparison: validation gates, variants, load, models."""

from __future__ import annotations

from collections.abc import Sequence

from prefixwise.bench.ab.report import HEADERS, cells_of, problems_of
from prefixwise.bench.artifacts import AbResult, LoadResult, ModelMatrix, MultiVsSerial, Parity
from prefixwise.bench.load.stats import figures_of
from prefixwise.bench.report.document import NONE, Block, Bullets, Cell, Paragraph, Section, judged, table
from prefixwise.bench.report.gates import gate_groups
from prefixwise.bench.report.inputs import ExtraInputs
from prefixwise.bench.report.named import Named
from prefixwise.bench.report.numbers import difference, figure, ratio
from prefixwise.bench.validation.model_table import table_cells, table_headers


def extra_sections(inputs: ExtraInputs) -> tuple[Section, ...]:
    """Only those for which there is something."""
    sections = []
    gates = _validation(inputs)
    if gates:
        sections.append(Section("Validation gates", gates))
    sections += [Section(f"Variants: {title}", _variants(each.content)) for title, each in _variant_titles(inputs.ab)]
    if inputs.load:
        sections.append(Section(_load_title(inputs.load), _load(inputs.load)))
    sections += [Section("Models", _models(each.content)) for each in inputs.model_matrix]
    return tuple(sections)


def _validation(inputs: ExtraInputs) -> tuple[Block, ...]:
    groups = gate_groups(inputs)
    every = [gate for group in groups for gate in group.gates]
    failed = sum(not gate.passed for gate in every)
    words = f"{failed} of {len(every)} gates FAILED." if failed else f"All {len(every)} gates passed."
    blocks: list[Block] = [Paragraph(words)] if every else []
    for group in groups:
        rows = [(gate.name, gate.value, gate.bound, judged(gate.passed)) for gate in group.gates]
        title = f"Gates: {group.name}" if group.name else "Gates"
        blocks += table(title, ("gate", "value", "bound", "result"), rows)
    for multi in inputs.multi_vs_serial:
        blocks += _speedups(multi, several=len(inputs.multi_vs_serial) > 1)
    for parity in inputs.parity:
        blocks += _parity(parity, several=len(inputs.parity) > 1)
    return tuple(blocks)


def _speedups(found: Named[MultiVsSerial], *, several: bool) -> tuple[Block, ...]:
    rows = [
        [
            count,
            figure(each.multi_p50_sec * 1000),
            figure(each.serial_p50_sec * 1000),
            ratio(each.speedup_vs_serial_p50),
        ]
        for count, each in found.content.performance.items()
    ]
    header = ("items", "multi-item p50 (ms)", "serial p50 (ms)", "speed-up")
    return table(f"Multi-item against one by one, {_of(found.content.model, found.name, several)}", header, rows)


def _parity(found: Named[Parity], *, several: bool) -> tuple[Block, ...]:
    """The fields are called after JAX, whatever the server was."""
    who, content = found.name if several else "JAX", found.content
    rows = [
        [f"{who} serial against transformers", difference(content.max_abs_diff_jax_serial_vs_torch_serial)],
        [f"{who} multi-item against transformers", difference(content.max_abs_diff_jax_multi_vs_torch_serial)],
        [
            f"{who} multi-item against transformers on the same prompt",
            difference(content.max_abs_diff_jax_multi_vs_torch_multi_semantic),
        ],
    ]
    title = ", ".join(filter(None, ("Parity", _of(content.model, found.name, several))))
    return table(title, ("scores", "max abs diff"), rows)


def _of(model: str | None, name: str, several: bool) -> str:
    """What a table is of; the name only where there are others."""
    return ", ".join(filter(None, (model, name if several else None)))


def _variant_titles(results: Sequence[Named[AbResult]]) -> list[tuple[str, Named[AbResult]]]:
    """With the backend, or the file, where only that tells two of them apart."""
    plain = [" vs ".join(variant.name for variant in each.content.variants) for each in results]
    names = {each.name for each in results}
    return [
        (f"{title} ({each.name})" if plain.count(title) > 1 and len(names) > 1 else title, each)
        for title, each in zip(plain, results, strict=True)
    ]


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


def _load_title(results: Sequence[Named[LoadResult]]) -> str:
    return f"Under load: {_shape(results[0].content)}" if len(results) == 1 else "Under load"


def _shape(result: LoadResult) -> str:
    """Which load it was."""
    if result.mode == "closed":
        return f"{result.concurrency} in flight"
    return f"{figure(result.rate_qps)} requests/s"


def _load(results: Sequence[Named[LoadResult]]) -> tuple[Block, ...]:
    """Side by side, then each with all of its figures."""
    header = ("server", "load", "answered/s", "items/s", "p50 (ms)", "p95 (ms)", "p99 (ms)", "goodput/s", "errors")
    blocks: list[Block] = [
        Paragraph(
            "Open: requests arrive at random times at a rate. Closed: so many are in flight, each sent when one is "
            "answered. Latency counts from the intended send time; goodput is what was answered within the p99 bound."
        ),
        *table("Load side by side", header, [_load_cells(each) for each in results]),
    ]
    for each in results:
        shape = each.content.geometry
        of = f"{each.name}, {_shape(each.content)}" if len(results) > 1 else "Measured"
        size = f"{shape.query_tokens:,} query tokens, {shape.num_items:,} items of {shape.item_tokens:,} tokens"
        blocks += table(f"{of}: {size}", ("figure", "value"), figures_of(each.content), numeric=False)
        blocks += _bullets(each.content.notes)
    return tuple(blocks)


def _load_cells(found: Named[LoadResult]) -> list[Cell | str]:
    result, phase = found.content, found.content.measured
    spread = phase.latency
    waits = [NONE] * 3 if spread is None else [figure(each) for each in (spread.p50_ms, spread.p95_ms, spread.p99_ms)]
    errors = [f"{code} {count}" for code, count in phase.errors_by_code.items()]
    errors += [f"dropped {phase.dropped}"] if phase.dropped else []
    goodput = NONE if phase.goodput is None else figure(phase.goodput.requests_per_sec)
    return [
        found.name,
        f"{result.mode}, {_shape(result)}",
        figure(phase.qps_answered),
        figure(phase.items_per_sec),
        *waits,
        goodput,
        Cell(", ".join(errors), "bad") if errors else "none",
    ]


def _models(matrix: ModelMatrix) -> tuple[Block, ...]:
    """The table of `validate models`, and why a model failed."""
    rows: list[tuple[Cell | str, ...]] = [
        (*cells, judged(row.status == "pass", bad=row.status.upper()))
        for row, (*cells, _) in zip(matrix.rows, table_cells(matrix.rows), strict=True)
    ]
    reached = {row.model for row in matrix.rows}
    reasons = [f"{row.model}: {row.status}: {row.reason}" for row in matrix.rows if row.reason]
    reasons += [f"{model}: not run" for model in matrix.models if model not in reached]
    return (*table("Models, each against its own bounds", table_headers(matrix.rows), rows), *_bullets(reasons))


def _bullets(lines: list[str]) -> tuple[Block, ...]:
    return (Bullets(tuple(lines)),) if lines else ()
