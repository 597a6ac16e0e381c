"""Files of the earlier system are read, checked, compared and reported; its programs find what they need in ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.files import read_artifact, sha256_of, write_artifact
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.kinds.evaluation import EndpointEvaluation
from prefixwise.bench.kinds.ops import OpsRow
from prefixwise.bench.kinds.registry import json_schema, kind_named
from prefixwise.bench.kinds.score_matrix import make_row
from prefixwise.bench.remote.folders import chunk_file, write_results
from prefixwise.bench.remote.on_target.chunk import begin_sweep
from prefixwise.bench.remote.spec import SweepSpec
from prefixwise.bench.rules import Bounds
from prefixwise.bench.run.check import check_file
from prefixwise.bench.run.comparison import compare, read_inputs
from prefixwise.bench.run.matrix import SweepOptions
from prefixwise.bench.run.validation import combine
from tests.bench import earlier_files as earlier
from tests.bench.earlier_files import Document, missing_from
from tests.bench.evaluations import multi_evaluation, serial_evaluation
from tests.bench.kinds.samples import SAMPLES, edited, reported
from tests.bench.matrix_samples import bad_run, good_row, good_run, shifted, write_matrix
from tests.cli.prefixwise_program import exit_status


def write(path: Path, document: Document) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2))
    return path


def read(path: Path) -> Document:
    found: Document = json.loads(path.read_text())
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every kind of file of the earlier system. JAX is best at 6 (60 items/s), PyTorch at 2 (50 items/s)."""
    for name, (_, make) in earlier.FILES.items():
        write(tmp_path / name, make())
    sha256 = sha256_of(tmp_path / "canonical_workload.json")
    near = [[0.501, 0.499]] * earlier.NUM_ITEMS
    jax_rows = [earlier.row(2, [200.0] * 3, near), earlier.row(6, [95.0, 105.0, 100.0], near)]
    jax_again = [earlier.row(2, [210.0] * 3, near), earlier.row(6, [100.0] * 3, near)]
    pytorch_rows = [earlier.row(2, [120.0] * 3), earlier.row(6, [80.0, None, 80.0])]
    jax = earlier.matrix("jax", jax_rows, jax_again, sha256)
    pytorch = earlier.matrix("pytorch", pytorch_rows, [earlier.row(2, [125.0] * 3)], sha256)
    write(tmp_path / "jax_matrix.json", jax)
    write(tmp_path / "pytorch_matrix.json", pytorch)
    write(tmp_path / "comparison.json", earlier.comparison(jax, pytorch))
    return tmp_path


def ours(folder: Path) -> Path:
    """The matrices of ours with the same rows, and their comparison."""
    near, partial = shifted(0.001), make_row(6, earlier.NUM_ITEMS, [good_run(0, 80.0), bad_run(1)], earlier.SCORES)
    rows: dict[str, Any] = {
        "jax": ([good_row(2, 200.0, near), good_row(6, 100.0, near)], [good_row(6, 100.0, near)]),
        "pytorch": ([good_row(2, 120.0), partial], [good_row(2, 125.0)]),
    }
    for backend, (swept, again) in rows.items():
        options = SweepOptions("jax" if backend == "jax" else "pytorch", "best_native", (2, 6))
        path = write_matrix(folder / f"{backend}_matrix.json", options, swept, again)
    inputs = read_inputs(folder / "jax_matrix.json", path, None, None)
    write_artifact(folder / "comparison.json", compare(inputs, Bounds()))
    return folder


def test_their_files_are_valid(folder: Path) -> None:
    kinds = {name: kind for name, (kind, _) in earlier.FILES.items()}
    matrices = {"jax_matrix.json": "score-matrix", "pytorch_matrix.json": "score-matrix"}
    for name, kind in {**kinds, **matrices, "comparison.json": "comparison"}.items():
        report = check_file(folder / name)
        assert (report.kind, reported(report)) == (kind, []), name
    assert exit_status("bench", "check", "--all", str(folder)) == 0


def test_a_delimiter_that_is_an_added_token_is_legal(folder: Path) -> None:
    """At the tokenizer's vocab_size, special or not; beyond the model's embedding it is not."""
    path = folder / "canonical_workload.json"
    for delimiter, special, errors in ((151643, [], 0), (151657, [151645], 0), (151936, [151645], 1)):
        changes = {"delimiter_token_id": delimiter, "tokenizer__special_token_ids": special}
        write(path, edited(earlier.workload(), **changes))
        assert len(reported(check_file(path))) == errors, delimiter


def test_their_matrices_are_compared(folder: Path) -> None:
    jax, pytorch = folder / "jax_matrix.json", folder / "pytorch_matrix.json"
    files = ("--jax-portable-json", str(jax), "--pytorch-portable-json", str(pytorch))
    native = ("--jax-best-native-json", str(jax), "--pytorch-best-native-json", str(pytorch))
    output = folder / "out.json"
    assert exit_status("bench", "compare", *files, *native, "--output-json", str(output)) == 0
    found = read_artifact(output, Comparison)
    assert (found.portable_view.winner.place, found.best_native_view.winner.place) == (("jax", 6), ("jax", 6))
    assert found.best_native_view.pytorch_selected is not None
    assert found.best_native_view.pytorch_selected["p95_total_e2e_ms"] == 125.0  # of the confirm phase
    assert earlier.report_findings(read(output)) == earlier.report_findings(read(folder / "comparison.json"))


@pytest.mark.parametrize("with_matrices", [True, False])
def test_their_comparison_is_reported(folder: Path, capsys: pytest.CaptureFixture[str], with_matrices: bool) -> None:
    if not with_matrices:
        for backend in ("jax", "pytorch"):
            (folder / f"{backend}_matrix.json").unlink()
    comparison, report = str(folder / "comparison.json"), folder / "report.md"
    assert exit_status("bench", "report", "--comparison-json", comparison, "--output-report", str(report)) == 0
    text = report.read_text()
    assert "Each at its best, JAX is 25.0% faster: 60.0 items/s in chunks of 6" in text
    assert "With the same client, JAX is" in text
    assert "The scores agree: they differ by at most 0.0010 (bound 0.02)." in text
    assert "3 of 4 rows of the sweep worked in every run." in text
    assert ("its runs and set-up are not shown" in text) != with_matrices


def test_their_evaluations_are_combined_into_their_result(folder: Path) -> None:
    pair = (read_artifact(folder / name, EndpointEvaluation) for name in list(earlier.FILES)[1:3])
    combined = combine(*pair).model_dump()
    theirs = earlier.multi_vs_serial()
    for name, content in theirs.items():
        own = {key: combined[name][key] for key in content} if isinstance(content, dict) else combined[name]
        if name == "performance":
            own = {"32": {key: own["32"][key] for key in content["32"]}}
        assert own == content, name


def test_their_results_pass_our_gates(folder: Path) -> None:
    first, second = folder / "multi_vs_serial_eval_results.json", folder / "jax_torch_parity_results.json"
    files = ("--multi-vs-serial-json", str(first), "--parity-json", str(second))
    assert exit_status("validate", "gate", *files) == 0
    assert all(earlier.passed_checks(read(first), read(second)).values())
    slow = edited(read(first), performance__32__speedup_vs_serial_p50=2.5)
    write(first, slow)
    assert exit_status("validate", "gate", *files) == 1


def test_our_files_have_their_fields(tmp_path: Path, folder: Path) -> None:
    made = ours(tmp_path / "ours")
    for name in ("jax_matrix.json", "pytorch_matrix.json", "comparison.json"):
        theirs = read(folder / name)
        for machine in ("hardware", "server_config"):  # each system's own
            theirs.pop(machine, None)
        assert missing_from(read(made / name), theirs) == [], name
    multi, serial = multi_evaluation(), serial_evaluation()
    documents = {
        "multi_item_eval_results.json": multi,
        "serial_score_eval_results.json": serial,
        "multi_vs_serial_eval_results.json": combine(multi, serial),
    }
    for name, artifact in documents.items():
        path = tmp_path / name
        write_artifact(path, artifact)
        assert missing_from(read(path), earlier.FILES[name][1]()) == [], name


def test_the_files_of_our_sweeps_have_their_fields(tmp_path: Path) -> None:
    spec = SweepSpec(folder=str(tmp_path), chunk_sizes=(64,), hardware="tpu-v6e-1", backend="jax", model="embedded")
    begin_sweep(spec, lambda line: None)
    write_artifact(chunk_file(tmp_path, 64), OpsRow(chunk_size=64, throughput_items_per_sec=79.5, status="ok"))
    write_results(tmp_path, spec, "jax", "tpu-v6e-1")
    for name in ("run_metadata.json", "matrix_results.json", "chunk_64.json"):
        assert missing_from(read(tmp_path / name), earlier.FILES[name][1]()) == [], name
        assert reported(check_file(tmp_path / name)) == []


def test_their_programs_find_what_they_need_in_ours(tmp_path: Path) -> None:
    made = ours(tmp_path)
    jax, pytorch = (earlier.best_native_row(read(made / f"{name}_matrix.json")) for name in ("jax", "pytorch"))
    assert jax is not None and pytorch is not None
    assert (jax["client_chunk_size"], jax["p95_total_e2e_ms"]) == (6, 100.0)
    assert (pytorch["client_chunk_size"], pytorch["p95_total_e2e_ms"]) == (2, 125.0)
    assert earlier.report_findings(read(made / "comparison.json")) == {
        "winners": [("jax", 6), ("jax", 6)],
        "jax_better": 0,
        "pytorch_better": 2,
        "native": [(6, 100.0, 1.0), (2, 125.0, 1.0)],
        "scores": ("ok", True),
    }
    theirs = earlier.comparison(read(made / "jax_matrix.json"), read(made / "pytorch_matrix.json"))
    assert earlier.report_findings(theirs) == earlier.report_findings(read(made / "comparison.json"))


def before(kind: str) -> Document:
    """The sample of a kind as prefixwise 0.1 wrote it."""
    document = SAMPLES[kind][1]()
    if kind == "score-matrix":
        for name in ("sweep", "confirm", "final"):
            found = document["summary"][f"{name}_recommendation"]
            document["summary"][f"{name}_recommendation"] = found["selected"]
    if kind == "comparison":
        for view in ("portable_view", "best_native_view"):
            found = document[view]["winner"]
            document[view]["winner"] = {**found["winner"], "ratio": found["ratio"], "deltas": found.get("deltas")}
        best = document["portable_view"]["backend_best"]
        document["portable_view"]["backend_best"] = {name: best[name]["winner"] for name in best}
        document["portable_view"]["rows"][0]["correctness"]["status"] = "compared"
        document["inputs"] = {"jax_portable": {"path": "jax_portable_matrix.json", "sha256": "0"}}
        del document["best_native_view"]["guardrail_ratio"]
    if kind == "endpoint-evaluation":
        for name in ("same_length_mutation", "changed_length_mutation"):
            changed = document["isolation"][name]
            items = document["isolation"]["item_ids"]
            changed["mutated_item_ids"] = [items[0], changed["mutated_item_ids"], items[2]]
    if kind == "parity":
        for name in ("torch_serial", "torch_multi_semantic"):
            document[f"{name}_scores"] = document.pop(f"{name}_reference_scores")
    if kind == "ops-run-metadata":
        document = {"model": "m", "chunk_sizes": [32], "started_at_utc": "2026-01-01T00:00:00Z"}
    return document


KINDS_BEFORE = ("score-matrix", "comparison", "endpoint-evaluation", "parity", "ops-run-metadata")


@pytest.mark.parametrize("kind", KINDS_BEFORE)
def test_our_files_of_before_are_read_and_written_in_their_shape(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / SAMPLES[kind][0], before(kind))
    write(tmp_path / SAMPLES["workload"][0], SAMPLES["workload"][1]())
    assert reported(check_file(path)) == []
    model = kind_named(kind).model
    assert model is not None
    write_artifact(path, read_artifact(path, model))
    if kind == "ops-run-metadata":
        assert read(path)["timestamp_start"] == "2026-01-01T00:00:00Z"
    else:
        now = {name: value for name, value in SAMPLES[kind][1]().items() if name != "inputs"}
        assert missing_from(read(path), now) == []


@pytest.mark.parametrize("kind", KINDS_BEFORE)
def test_the_schema_takes_both_shapes(kind: str) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json_schema(kind_named(kind)))
    validator.validate(before(kind))
    validator.validate(SAMPLES[kind][1]())
