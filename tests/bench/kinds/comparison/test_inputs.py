from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact, write_artifact
from prefixwise.bench.kinds.comparison.inputs import ReportPaths, find_file, read_report_inputs
from prefixwise.bench.kinds.comparison.report import flatten, make_report
from prefixwise.bench.kinds.extras import validation_checks
from prefixwise.bench.kinds.gate_report import GateReport, judge
from prefixwise.bench.kinds.named import file_name, read_distinct
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.options import GateBounds
from prefixwise.bench.render.markdown import report_markdown
from prefixwise.contract.errors import ArtifactError
from tests.bench.report_samples import multi_vs_serial, parity, write_comparison


def test_files_are_found_beside_the_comparison_or_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
    (folder / "near.json").touch()
    (elsewhere / "far.json").touch()
    monkeypatch.chdir(elsewhere)
    assert find_file("near.json", folder) == folder / "near.json"
    assert find_file("far.json", folder) == Path("far.json")
    assert find_file("/gone/with/its/folder/near.json", folder) == folder / "near.json"
    assert find_file("nowhere.json", folder) is None


def test_a_folder_may_be_moved(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write_comparison(tmp_path / "old")
    shutil.move(tmp_path / "old", tmp_path / "new")
    inputs = read_report_inputs(ReportPaths(tmp_path / "new" / "comparison.json"))
    assert len(inputs.matrices) == 4
    assert len(inputs.distinct_matrices()) == 2
    assert inputs.notes == []


def test_a_missing_matrix_is_a_note(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    (tmp_path / "jax_matrix.json").unlink()
    inputs = read_report_inputs(ReportPaths(path))
    assert sorted(inputs.matrices) == ["pytorch_best_native", "pytorch_portable"]
    assert len(inputs.notes) == 2
    assert inputs.notes[0].startswith("jax_portable: ")
    page = report_markdown(make_report(inputs, "2026-02-11"))
    assert "its runs and set-up are not shown" in page
    assert "| 1 | 50.0 | 100.0 |" in page  # the comparison has the metrics


def test_without_any_matrix_there_is_still_a_report(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    for backend in ("jax", "pytorch"):
        (tmp_path / f"{backend}_matrix.json").unlink()
    page = report_markdown(make_report(read_report_inputs(ReportPaths(path)), "2026-02-11"))
    assert "| PyTorch portable, chunk size 6 | 2 x oom | - |" in page.splitlines()
    assert "None of the matrices could be read" in page


def test_a_comparison_that_names_no_matrices_is_one_of_others(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    content = json.loads(path.read_text())
    content["correctness"] = {}
    for row in content["portable_view"]["rows"]:
        del row["deltas"]
    path.write_text(json.dumps({**content, "inputs": {}}))
    inputs = read_report_inputs(ReportPaths(path))
    assert inputs.matrices == {}
    report = make_report(inputs, "2026-02-11")
    assert report.passed
    assert report.verdict.startswith("With the same client, PyTorch is 200.0% faster: ")
    assert "they differ by at most 0.0040 (no bound given)" in report.verdict


def test_without_a_winner_there_is_no_report(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    content = json.loads(path.read_text())
    del content["portable_view"]["winner"]["winner"]
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"is no Comparison: portable_view\.winner\.winner: Field required"):
        read_report_inputs(ReportPaths(path))


def test_a_matrix_that_has_changed_is_a_note(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    with (tmp_path / "jax_matrix.json").open("a") as file:
        file.write("\n")
    assert "jax_matrix.json has changed since it was compared" in read_report_inputs(ReportPaths(path)).notes[0]


def test_a_broken_matrix_is_a_note_but_a_broken_comparison_is_not(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    (tmp_path / "jax_matrix.json").write_text("{}")
    assert "is no ScoreMatrix" in read_report_inputs(ReportPaths(path)).notes[0]
    path.write_text("{}")
    with pytest.raises(ArtifactError, match="is no Comparison"):
        read_report_inputs(ReportPaths(path))


def test_gates_are_of_what_is_given(tmp_path: Path) -> None:
    multi = tmp_path / "multi_vs_serial.json"
    write_artifact(multi, multi_vs_serial())
    paths = ReportPaths(write_comparison(tmp_path), multi_vs_serial=(multi,))
    (checks,) = validation_checks(read_report_inputs(paths)).values()
    assert "jax_serial_vs_torch_serial_le_0p02" not in checks
    assert len(checks) == 4
    page = report_markdown(make_report(read_report_inputs(paths), "2026-02-11"))
    assert "All 4 gates passed." in page
    assert "| speedup_n32_ge_3x | 4.00 | >= 3 | pass |" in page.splitlines()
    assert "| 32 | 50.0 | 200.0 | 4.00x |" in page.splitlines()


def test_a_failed_gate_is_said(tmp_path: Path) -> None:
    multi, against = tmp_path / "multi.json", tmp_path / "parity.json"
    write_artifact(multi, multi_vs_serial(speedup=2.0))
    write_artifact(against, parity())
    inputs = read_report_inputs(ReportPaths(write_comparison(tmp_path), (multi,), (against,)))
    report = make_report(inputs, "2026-02-11")
    assert not report.passed
    assert report.verdict.endswith("Validation gates FAILED: speedup_n32_ge_3x.")
    page = report_markdown(report)
    assert "1 of 5 gates FAILED." in page
    assert "| speedup_n32_ge_3x | 2.00 | >= 3 | **FAIL** |" in page.splitlines()
    assert "| jax_serial_vs_torch_serial_le_0p02 | 0.0040 | \\<= 0.02 | pass |" in page.splitlines()


def test_a_judgement_that_is_given_counts(tmp_path: Path) -> None:
    judged = judge(multi_vs_serial(2.0).model_dump(), parity().model_dump(), GateBounds(min_speedup=1.5))
    gate = tmp_path / "gate.json"
    write_artifact(gate, judged)
    assert read_artifact(gate, GateReport).all_pass
    inputs = read_report_inputs(ReportPaths(write_comparison(tmp_path), gate=(gate,)))
    assert "| speedup_n32_ge_3x | 2.00 | >= 1.5 | pass |" in report_markdown(make_report(inputs, "2026-02-11"))


def test_every_backend_has_its_own_gates_and_one_that_fails_counts(tmp_path: Path) -> None:
    for backend, speedup in (("jax", 4.0), ("pytorch", 2.0)):
        write_artifact(tmp_path / f"{backend}_multi_vs_serial.json", multi_vs_serial(speedup))
        write_artifact(tmp_path / f"{backend}_parity.json", parity())
        metrics = (multi_vs_serial(speedup).model_dump(), parity().model_dump())
        write_artifact(tmp_path / f"{backend}_gate.json", judge(*metrics, GateBounds()))
    multi, against, gates = (
        tuple(tmp_path / f"{backend}_{kind}.json" for backend in ("jax", "pytorch"))
        for kind in ("multi_vs_serial", "parity", "gate")
    )
    paths = ReportPaths(write_comparison(tmp_path), multi, against, gates)
    report = make_report(read_report_inputs(paths), "2026-02-11")
    assert report.passed is False
    assert report.verdict.endswith("Validation gates FAILED: PyTorch speedup_n32_ge_3x.")
    assert (report.cards[-1].value, report.cards[-1].detail) == ("1 FAILED", "9 of 10 passed")
    page = report_markdown(report)
    jax, pytorch = page.split("Gates: JAX\n")[1].split("Gates: PyTorch\n")
    assert "| speedup_n32_ge_3x | 4.00 | >= 3 | pass |" in jax.splitlines()
    assert "| speedup_n32_ge_3x | 2.00 | >= 3 | **FAIL** |" in pytorch.splitlines()
    assert "Multi-item against one by one, fake-model, PyTorch" in page.splitlines()
    assert "| PyTorch serial against transformers | 0.0040 |" in page.splitlines()
    assert page.count("--gate-json") == 2


def test_a_file_without_a_judgement_of_its_name_has_the_default_bounds(tmp_path: Path) -> None:
    judged = judge(multi_vs_serial().model_dump(), parity().model_dump(), GateBounds())
    write_artifact(tmp_path / "jax_gate.json", judged)
    for backend, speedup in (("jax", 4.0), ("torch", 2.0)):
        write_artifact(tmp_path / f"{backend}_multi_vs_serial.json", multi_vs_serial(speedup))
    multi = tuple(tmp_path / f"{backend}_multi_vs_serial.json" for backend in ("jax", "torch"))
    paths = ReportPaths(write_comparison(tmp_path), multi, gate=(tmp_path / "jax_gate.json",))
    checks = validation_checks(read_report_inputs(paths))
    assert {name: len(each) for name, each in checks.items()} == {"JAX": 5, "PyTorch": 4}
    assert not checks["PyTorch"]["speedup_n32_ge_3x"].passed


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("out/jax_gate.json", "JAX"),
        ("out/torch-parity.json", "PyTorch"),
        ("smollm/gate.json", "smollm"),
        ("multi_vs_serial_eval_results_20260207.json", "20260207"),
        ("night run gate.json", "night run"),
    ],
)
def test_a_file_is_called_by_what_it_is_of(path: str, name: str) -> None:
    assert file_name(Path(path)) == name


def test_two_files_of_one_name_go_by_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "jax_parity.json" for folder in ("one", "two")]
    for path in paths:
        write_artifact(path, parity())
    assert [each.name for each in read_distinct(paths, Parity)] == [str(path) for path in paths]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "should be a finite number"),
        ("12", "should be a valid number"),
        (-1.0, "greater than or equal to 0"),
    ],
)
@pytest.mark.parametrize("view", ["portable", "best_native"])
def test_a_figure_that_is_no_number_is_an_error(tmp_path: Path, view: str, value: object, problem: str) -> None:
    path = write_comparison(tmp_path)
    content = json.loads(path.read_text())
    rows = {"portable": content["portable_view"]["rows"][0]["jax"], "best_native": content["best_native_view"]}
    row = rows[view] if view == "portable" else rows[view]["jax_selected"]
    row["throughput_items_sec"] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=f"throughput_items_sec: .*{problem}"):
        read_report_inputs(ReportPaths(path))


def test_a_row_of_another_tool_may_have_fewer_figures_or_more(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    content = json.loads(path.read_text())
    content["portable_view"]["rows"][0]["jax"] = {"throughput_items_sec": 50, "colour": "blue"}
    path.write_text(json.dumps(content))
    inputs = read_report_inputs(ReportPaths(path))
    assert inputs.comparison.portable_view.rows[0].jax == {"throughput_items_sec": 50, "colour": "blue"}
    assert "| 1 | 50.0 | 100.0 | -50.0% | - | 60.0 |" in report_markdown(make_report(inputs, "2026-02-11"))


def test_facts_are_flat_and_sizes_have_a_unit() -> None:
    facts = {"versions": {"jax": "0.10"}, "memory": {"peak_host_bytes": 3 * 2**20}, "name": None, "sizes": [1, 2]}
    assert dict(flatten(facts)) == {"versions.jax": "0.10", "memory.peak_host_bytes": "3 MiB", "sizes": "[1, 2]"}
    assert dict(flatten({"long": "x" * 200})) == {"long": "x" * 117 + "..."}
