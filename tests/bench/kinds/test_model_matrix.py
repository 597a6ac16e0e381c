from __future__ import annotations

from prefixwise.bench.kinds.model_matrix import (
    MODEL_MATRIX_VERSION,
    ModelMatrix,
    ModelRow,
    table_cells,
    table_headers,
)
from prefixwise.bench.render.markdown import report_markdown
from prefixwise.bench.run.report import report_of

MEASURED = ModelRow(
    model="Qwen/Qwen3-0.6B",
    status="fail",
    reason="speedup_n32_ge_3x: too slow | really",
    same_length_isolation_max=0.0,
    changed_length_isolation_max=0.00004,
    delimiter_aligned_equivalence_max=0.0148,
    jax_serial_vs_torch_serial_max=0.00409,
    jax_multi_vs_torch_multi_semantic_max=0.01151,
    speedups={"1": 1.0, "8": 3.449, "32": 2.5, "128": 5.3},
)
FAILED = ModelRow(model="a`b", status="error", reason="it cannot be loaded")
FIGURES = ["0.0000", "4.0e-05", "0.0148", "0.0041", "0.0115"]


def matrix(*rows: ModelRow) -> ModelMatrix:
    return ModelMatrix(
        schema_version=MODEL_MATRIX_VERSION,
        generated_at_utc="2026-02-07T00:00:00Z",
        models=[row.model for row in rows],
        rows=list(rows),
        all_pass=False,
    )


def test_the_columns_are_those_of_the_earlier_report_and_the_result() -> None:
    assert table_headers([MEASURED, FAILED]) == [
        "Model",
        "Same-len isolation max",
        "Changed-len isolation max",
        "Delimiter-aligned equiv max",
        "JAX serial vs torch serial max",
        "JAX multi vs torch multi-sem max",
        "Speedup N=8",
        "Speedup N=32",
        "Speedup N=128",
        "Result",
    ]


def test_a_model_is_a_row_of_figures_or_of_none() -> None:
    measured, failed = table_cells([MEASURED, FAILED])
    assert measured == ["Qwen/Qwen3-0.6B", *FIGURES, "3.45x", "2.50x", "5.30x", "fail"]
    assert failed == ["a`b", *["-"] * 8, "error"]


def test_where_none_of_the_reports_counts_was_measured_all_are_shown() -> None:
    few = MEASURED.model_copy(update={"speedups": {"2": 1.5, "1": 0.5}})
    assert table_headers([few])[6:] == ["Speedup N=1", "Speedup N=2", "Result"]
    assert table_cells([few])[0][6:] == ["0.50x", "1.50x", "fail"]
    assert table_headers([FAILED])[6:] == ["Result"]


def test_markdown_has_the_table_and_below_it_the_reasons() -> None:
    lines = report_markdown(report_of(matrix(MEASURED, FAILED), "models.json")).splitlines()
    header = next(place for place, line in enumerate(lines) if line.startswith("| Model | Same-len isolation max |"))
    assert lines[header + 1] == "| --- |" + " ---: |" * 9
    assert lines[header + 2] == f"| Qwen/Qwen3-0.6B | {' | '.join(FIGURES)} | 3.45x | 2.50x | 5.30x | **FAIL** |"
    assert lines[header + 3].startswith("| a\\`b | - |")
    assert lines[header + 4 :] == [
        "",
        "- Qwen/Qwen3-0.6B: fail: speedup_n32_ge_3x: too slow \\| really",
        "- a\\`b: error: it cannot be loaded",
    ]


def test_where_all_pass_there_is_nothing_below() -> None:
    passed = MEASURED.model_copy(update={"status": "pass", "reason": None})
    assert report_markdown(report_of(matrix(passed), "models.json")).splitlines()[-1].endswith("| pass |")
