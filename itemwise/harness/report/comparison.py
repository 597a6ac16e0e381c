"""The heart of the report: the verdict, and the two backends side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from itemwise.harness.artifacts import BackendName, Comparison, Correctness
from itemwise.harness.report.document import NONE, Block, Card, Cell, Paragraph, judged, table
from itemwise.harness.report.inputs import BACKEND_NAMES, BACKENDS
from itemwise.harness.report.numbers import change_percent, difference, figure, percent

THROUGHPUT = "throughput_items_sec"
P50 = "p50_total_e2e_ms"
P95 = "p95_total_e2e_ms"
METRICS = {THROUGHPUT: ("throughput", "items/s"), P50: ("p50 latency", "ms"), P95: ("p95 latency", "ms")}
_OTHER: Mapping[BackendName, BackendName] = {"jax": "pytorch", "pytorch": "jax"}


def passed(comparison: Comparison) -> bool:
    """Of all rows that could be compared, of which there must be some, and of the best-native ones."""
    said = comparison.correctness.get("pass")
    if isinstance(said, bool):
        return said
    rows = [row.correctness for row in comparison.portable_view.rows if row.correctness.status != "missing"]
    return bool(rows) and all(row.passed for row in rows) and comparison.best_native_view.correctness.passed


def thresholds(comparison: Comparison) -> tuple[float | None, float | None]:
    """Of the largest difference, and of the mean one."""
    found = comparison.correctness.get("thresholds") or {}
    return found.get("max_abs_diff"), found.get("mean_abs_diff")


def verdict(comparison: Comparison) -> str:
    """One paragraph in plain words."""
    portable, native = comparison.portable_view, comparison.best_native_view
    sentences = [
        _race("With the same client", portable.winner, portable.backend_best),
        _race("Each at its best", native.winner, selected(comparison)),
        _agreement(comparison),
        _reliability(comparison),
    ]
    return " ".join(sentences)


def _race(how: str, winner: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    backend = winner.get("backend")
    if "backend" not in winner:
        return f"{how}, the comparison names no winner."
    if backend == "tie":
        return f"{how}, the two are equal: {_best(rows.get('jax'))}."
    if backend not in BACKENDS:
        return f"{how}, neither can be recommended: no chunk size counts."
    other = _OTHER[backend]
    mine, theirs = rows.get(backend) or {}, rows.get(other) or {}
    change = change_percent(mine.get(THROUGHPUT), theirs.get(THROUGHPUT))
    begin = f"{how}, {BACKEND_NAMES[backend]}"
    if change is None:
        return f"{begin} is the only one that counts: {_best(mine)}."
    what = f"{_best(mine)}; {BACKEND_NAMES[other]} does {_best(theirs)}"
    if change < 0:
        why = "because the other's p95 is beyond the guardrail"
        return f"{begin} wins although it is {-change:.1f}% slower, {why}: {what}."
    return f"{begin} is {change:.1f}% faster: {what}."


def _best(row: Mapping[str, Any] | None) -> str:
    row = row or {}
    return f"{figure(row.get(THROUGHPUT))} items/s in chunks of {row.get('client_chunk_size', NONE)}"


def _agreement(comparison: Comparison) -> str:
    bound, _ = thresholds(comparison)
    known = [each.max_abs_diff for each in _all_correctness(comparison) if each.max_abs_diff is not None]
    if not known:
        return "Whether the scores agree is not known: none could be compared."
    words = "The scores agree" if passed(comparison) else "The scores do NOT agree everywhere"
    limit = "no bound given" if bound is None else f"bound {bound:g}"
    return f"{words}: they differ by at most {difference(max(known))} ({limit})."


def _reliability(comparison: Comparison) -> str:
    good, runs = run_counts(comparison)
    if good == runs:
        return f"All {runs} timed runs of the sweep worked."
    return f"{runs - good} of {runs} timed runs of the sweep failed; the rows they belong to cannot win."


def run_counts(comparison: Comparison) -> tuple[int, int]:
    """Runs of the portable sweep that worked, and all of them."""
    rows = [row for each in comparison.portable_view.rows for row in (each.jax, each.pytorch) if row]
    return sum(row.get("successful_runs", 0) for row in rows), sum(row.get("timed_runs", 0) for row in rows)


def _all_correctness(comparison: Comparison) -> list[Correctness]:
    return [*(row.correctness for row in comparison.portable_view.rows), comparison.best_native_view.correctness]


def selected(comparison: Comparison) -> dict[str, Any]:
    """The best-native rows by backend."""
    native = comparison.best_native_view
    return {"jax": native.jax_selected, "pytorch": native.pytorch_selected}


def cards(comparison: Comparison) -> tuple[Card, ...]:
    """What people look for first."""
    portable, native = comparison.portable_view, comparison.best_native_view
    known = [each.max_abs_diff for each in _all_correctness(comparison) if each.max_abs_diff is not None]
    good, runs = run_counts(comparison)
    return (
        _race_card("Same client", portable.winner, portable.backend_best),
        _race_card("Each at its best", native.winner, selected(comparison)),
        Card(
            "Scores",
            "agree" if passed(comparison) else "DIFFER",
            f"at most {difference(max(known))} apart" if known else "nothing compared",
            "good" if passed(comparison) else "bad",
        ),
        Card(
            "Runs that worked",
            f"{good / runs:.0%}" if runs else NONE,
            f"{good} of {runs} timed runs",
            "plain" if good == runs else "bad",
        ),
    )


def _race_card(name: str, winner: Mapping[str, Any], rows: Mapping[str, Any]) -> Card:
    backend = winner.get("backend")
    detail = ", ".join(f"{BACKEND_NAMES[each]} {figure((rows.get(each) or {}).get(THROUGHPUT))}" for each in BACKENDS)
    if backend not in BACKENDS:
        return Card(name, "tie" if backend == "tie" else "neither", f"{detail} items/s")
    mine, theirs = (rows.get(each) or {} for each in (backend, _OTHER[backend]))
    change = change_percent(mine.get(THROUGHPUT), theirs.get(THROUGHPUT))
    by = "" if change is None else f" {percent(change)}"
    return Card(name, f"{BACKEND_NAMES[backend]}{by}", f"{detail} items/s")


def portable_table(comparison: Comparison) -> tuple[Block, ...]:
    """A row for each chunk size."""
    header = ["chunk size (items)"]
    for unit, name in (("items/s", "items/s"), ("p50 (ms)", "p50"), ("p95 (ms)", "p95")):
        header += [f"JAX {unit}", f"PyTorch {unit}", f"{name} change"]
    header += ["max score diff", "mean score diff", "scores"]
    rows = [_portable_cells(row) for row in comparison.portable_view.model_dump(by_alias=True)["rows"]]
    sides = [side for row in comparison.portable_view.rows for side in (row.jax, row.pytorch) if side]
    partial = any(side.get("status") == "partial_failure" for side in sides)
    caption = "Portable view: the same client, the same chunks. Change is JAX against PyTorch."
    caption += " (4/5): of 4 runs of 5, the others failed." if partial else ""
    return table(caption, header, rows)


def _portable_cells(row: Mapping[str, Any]) -> list[Cell | str]:
    jax, pytorch, correctness = row["jax"] or {}, row["pytorch"] or {}, row["correctness"]
    cells: list[Cell | str] = [str(row["client_chunk_size"])]
    for metric in METRICS:
        for side in (jax, pytorch):
            cells.append(_throughput(side) if metric == THROUGHPUT else figure(side.get(metric)))
        cells.append(percent(change_percent(jax.get(metric), pytorch.get(metric))))
    return [
        *cells,
        difference(correctness["max_abs_diff"]),
        difference(correctness["mean_abs_diff"]),
        judged_scores(correctness["status"], correctness["pass"]),
    ]


def _throughput(row: Mapping[str, Any]) -> Cell | str:
    """With how many runs it is of, where some failed."""
    if row.get("status") == "failed":
        return Cell("failed", "bad")
    if row.get("status") == "partial_failure":
        return f"{figure(row.get(THROUGHPUT))} ({row.get('successful_runs')}/{row.get('timed_runs')})"
    return figure(row.get(THROUGHPUT))


def judged_scores(status: str, agree: bool) -> Cell:
    """Scores that are missing were not judged."""
    return judged(agree) if status == "compared" else Cell(status.replace("_", " "), "bad" if not agree else "good")


def native_table(comparison: Comparison) -> tuple[Block, ...]:
    """Each backend at its best."""
    rows = selected(comparison)
    jax, pytorch = rows["jax"] or {}, rows["pytorch"] or {}
    sizes = [str(row.get("client_chunk_size", NONE)) for row in (jax, pytorch)]
    lines = [["chunk size (items)", *sizes, NONE]]
    for metric, (name, unit) in METRICS.items():
        values = (jax.get(metric), pytorch.get(metric))
        lines.append([f"{name} ({unit})", *map(figure, values), percent(change_percent(*values))])
    if jax.get("usd_per_run") is not None or pytorch.get("usd_per_run") is not None:
        values = (jax.get("items_per_usd"), pytorch.get("items_per_usd"))
        lines.append(["items per USD", *map(figure, values), percent(change_percent(*values))])
    correctness = comparison.best_native_view.correctness
    words = correctness.detail or correctness.status
    block = table("Best native view: each backend with its own settings.", ("", "JAX", "PyTorch", "change"), lines)
    return (*block, Paragraph(f"Scores of the two selected rows: {'pass' if correctness.passed else 'FAIL'}, {words}."))
