from __future__ import annotations

from pathlib import Path

import pytest

from prefixwise.bench.kinds.comparison.inputs import ReportPaths, read_report_inputs
from prefixwise.bench.kinds.comparison.report import make_report
from prefixwise.bench.render.document import Bullets, Cell, Chart, Charts, Code, Report, Section, Table
from prefixwise.bench.render.markdown import code_span, escaped, report_markdown
from tests.bench.matrix_samples import good_row
from tests.bench.report_samples import agreeing_rows, sample_inputs, write_comparison


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report_markdown(make_report(sample_inputs(tmp_path_factory.mktemp("report")), "2026-02-11"))


def test_it_begins_with_title_date_and_verdict(page: str) -> None:
    title, _, verdict = page.splitlines()[:3]
    assert title == "# JAX vs PyTorch: multi-item scoring (2026-02-11)"
    # 6 items in 40 ms are 150 items/s, in 120 ms 50, in 20 ms 300.
    assert verdict == (
        "With the same client, PyTorch is 200.0% faster: 150.0 items/s in chunks of 2; "
        "JAX does 50.0 items/s in chunks of 1. "
        "Each at its best, JAX is 100.0% faster: 300.0 items/s in chunks of 6; "
        "PyTorch does 150.0 items/s in chunks of 2. "
        "The scores agree: they differ by at most 0.0040 (bound 0.02). "
        "3 of 12 timed runs of the sweep failed; the rows they belong to cannot win."
    )


@pytest.mark.parametrize(
    "line",
    [
        "| 1 | 50.0 | 100.0 | -50.0% | 120.0 | 60.0 | +100.0% | 120.0 | 60.0 | +100.0% | 0.0010 | 0.0010 | pass |",
        "| 2 | 200.0 (1/2) | 150.0 | +33.3% | 30.0 | 40.0 | -25.0% | 30.0 | 40.0 | -25.0% | 0.0040 | 0.0040 | pass |",
        "| 6 | 300.0 | **failed** | - | 20.0 | - | - | 20.0 | - | - | - | - | not compared |",
    ],
)
def test_the_portable_table_has_every_chunk_size(page: str, line: str) -> None:
    assert line in page.splitlines()


@pytest.mark.parametrize(
    "line",
    [
        "| chunk size (items) | 6 | 2 | - |",
        "| throughput (items/s) | 300.0 | 150.0 | +100.0% |",
        "| p95 latency (ms) | 20.0 | 40.0 | -50.0% |",
        "Scores of the two selected rows: pass, max abs diff 0 (at most 0.02), mean 0 (at most 0.01).",
    ],
)
def test_the_best_native_summary_has_deltas(page: str, line: str) -> None:
    assert line in page.splitlines()


def test_where_jax_is_better_and_worse_is_sorted_by_the_difference(page: str) -> None:
    assert "Of 9 metrics that differ, JAX is better in 6 and worse in 3." in page
    better, worse = page.split("Where JAX is better\n")[1].split("Where JAX is worse\n")
    assert _first_cells(better) == [
        "best native, throughput, +100.0%",
        "best native, p50 latency, -50.0%",
        "best native, p95 latency, -50.0%",
        "chunk size 2, throughput, +33.3%",
        "chunk size 2, p50 latency, -25.0%",
        "chunk size 2, p95 latency, -25.0%",
    ]
    assert _first_cells(worse.split("\n## ")[0]) == [
        "chunk size 1, p50 latency, +100.0%",
        "chunk size 1, p95 latency, +100.0%",
        "chunk size 1, throughput, -50.0%",
    ]
    assert "| chunk size 2 | throughput | 200.0 items/s | 150.0 items/s | +33.3% | some runs of JAX failed |" in better


def _first_cells(text: str) -> list[str]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    return [f"{cells[0]}, {cells[1]}, {cells[4]}" for cells in rows]


@pytest.mark.parametrize(
    "line",
    [
        "| chunk size 2 | 0.0040 | 0.0040 | 12 | pass | - |",
        "| chunk size 6 | - | - | 0 | not compared | no scores of pytorch |",
        "| best native | 0 | 0 | 12 | pass | - |",
        "| row | max diff (at most 0.02) | mean diff (at most 0.01) | scores compared | gate | detail |",
    ],
)
def test_the_correctness_gates_have_their_bounds(page: str, line: str) -> None:
    assert line in page.splitlines()


@pytest.mark.parametrize(
    "line",
    [
        "| 2 | **1 of 2 (50.0%)** | 2 of 2 (100.0%) | - | 1.00x |",
        "| JAX portable, chunk size 2 | 1 x timeout | chunk 1 of 3: too late |",
        r"| PyTorch portable, chunk size 6 | 2 x oom | \<b>out \| of memory\</b> |",
    ],
)
def test_stability_tells_success_first_runs_and_failures(page: str, line: str) -> None:
    assert line in page.splitlines()


def test_the_set_up_has_hardware_versions_and_the_checksum(page: str) -> None:
    assert "| name | `TPU <v6e>` | `G4` |" in page
    assert "| versions.jax | `0.10` | - |" in page
    assert "| items | 6 of 2 tokens each |" in page
    inside = page.split("sha256 of the request | `")[1]
    assert len(inside.partition("`")[0]) == 64


def test_the_commands_can_be_run_again(page: str) -> None:
    commands = page.split("```bash\n")[1].split("```")[0].replace(" \\\n  ", " ").split("\n\n")
    assert [command.split()[:3] for command in commands] == [
        ["prefixwise", "bench", verb] for verb in ("workload", "matrix", "matrix", "compare", "report")
    ]
    assert "--client-chunk-sizes 1,2,6 --warmup-runs 1 --timed-runs 2" in commands[1]
    assert "--hardware 'jax machine'" in commands[1]
    assert "--correctness-threshold-max-abs 0.02" in commands[3]


def test_the_confirm_phase_is_set_against_the_sweep(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, agreeing_rows(100.0), agreeing_rows(100.0), [good_row(1, 125.0)])
    page = report_markdown(make_report(read_report_inputs(ReportPaths(path)), "2026-02-11"))
    assert "| JAX portable, chunk size 1 | 60.0 | 48.0 | -20.0% | 100.0 | 125.0 | +25.0% |" in page.splitlines()
    assert page.splitlines()[2].endswith(
        "Take the metrics with care: measured again, JAX portable, chunk size 1 had -20.0% throughput, "
        "so the machine was not steady."
    )
    assert "No timed run failed." in page
    assert "All 12 timed runs of the sweep worked." in page


def test_a_confirm_phase_within_ten_percent_is_steady(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, agreeing_rows(100.0), agreeing_rows(100.0), [good_row(1, 110.0)])  # -9.1%
    assert make_report(read_report_inputs(ReportPaths(path)), "2026-02-11").verdict.endswith("of the sweep worked.")


def test_scores_that_differ_too_much_are_said_first(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, agreeing_rows(50.0, by=0.03), agreeing_rows(100.0))
    report = make_report(read_report_inputs(ReportPaths(path)), "2026-02-11")
    assert not report.passed
    assert "PyTorch is the only one that counts: 60.0 items/s in chunks of 1." in report.verdict
    assert "The scores do NOT agree everywhere: they differ by at most 0.0300 (bound 0.02)." in report.verdict
    page = report_markdown(report)
    assert "| chunk size 1 | 0.0300 | 0.0300 | 12 | **FAIL** | - |" in page.splitlines()
    assert "scores are not within bounds" in page


def test_equal_backends_are_a_tie(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, agreeing_rows(100.0), agreeing_rows(100.0))
    report = make_report(read_report_inputs(ReportPaths(path)), "2026-02-11")
    assert "With the same client, the two are equal: 60.0 items/s in chunks of 1." in report.verdict
    assert "The two differ in no metric." in report_markdown(report)
    assert [card.value for card in report.cards] == ["tie", "tie", "agree", "100%"]


def test_words_are_read_as_they_are() -> None:
    assert escaped("a|b <i> *x* `y` [z]\nnext") == r"a\|b \<i> \*x\* \`y\` \[z\] next"
    assert escaped("snake_case and _this_") == r"snake_case and \_this\_"
    assert code_span("a|b") == r"`a\|b`"
    assert code_span("a`b") == "`` a`b ``"


def test_every_kind_of_block_is_written_but_figures() -> None:
    blocks = (
        Bullets(("one", "two")),
        Code("a --b"),
        Table("Name", ("x", "y"), (("1", Cell("no", "bad")), ("2", Cell("p q", "code")))),
        Charts((Chart("Name", "<svg></svg>", "seen"),)),
    )
    report = Report("T", "2026-01-01", True, ("V",), (), (Section("S", blocks),))
    assert report_markdown(report) == (
        "# T (2026-01-01)\n\nV\n\n## S\n\n- one\n- two\n\n```bash\na --b\n```\n\n"
        "Name\n\n| x | y |\n| --- | ---: |\n| 1 | **no** |\n| 2 | `p q` |\n"
    )
