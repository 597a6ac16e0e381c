from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwise.bench.files import write_artifact
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.registry import KINDS, MODELED_KINDS, kind_named
from prefixwise.bench.run.check import check_file, json_files
from prefixwise.bench.run.workload import WorkloadOptions, make_workload
from prefixwise.bench.tokens import token_facts
from prefixwise.contract.errors import ArtifactError
from tests.bench.kinds.samples import GONE, SAMPLES, check, reported, warned, write_all


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_sample_is_valid(tmp_path: Path, kind: str) -> None:
    report = check_file(write_all(tmp_path) / SAMPLES[kind][0])
    assert (report.kind, reported(report), report.is_valid) == (kind, [], True)


def test_the_workload_that_we_make_is_valid_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    write_artifact(path, make_workload(WorkloadOptions(50, 8, 5, 2), token_facts("Qwen/Qwen3-0.6B")))
    report = check_file(path, ["workload"])
    assert (report.errors, report.warnings) == ((), ())


@pytest.mark.parametrize("content", ["", '{"schema_version": "score_ma', "score", "\udc80"])
def test_what_is_no_json_is_invalid(tmp_path: Path, content: str) -> None:
    path = tmp_path / "matrix.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    (error,) = reported(check_file(path))
    assert error.startswith("the file: expected JSON, got ")


@pytest.mark.parametrize(
    "content", ['{"hardware": {"usd_per_hour": NaN}}', '{"a": [-Infinity]}', "[" * 100_000, '{"a": ' * 100_000]
)
def test_what_only_python_reads_and_what_nothing_reads_is_no_json(tmp_path: Path, content: str) -> None:
    path = tmp_path / "matrix.json"
    path.write_text(content)
    (error,) = reported(check_file(path))
    assert error.startswith("the file: expected JSON, got ")


def test_a_number_that_is_none_in_a_free_field_is_told(tmp_path: Path) -> None:
    path = tmp_path / "jax_portable_matrix.json"
    path.write_text(json.dumps({**SAMPLES["score-matrix"][1](), "hardware": {"watts": float("nan")}}))
    assert reported(check_file(path)) == ["the file: expected JSON, got NaN, which is no number of JSON"]


def test_a_fault_in_a_rule_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(artifact: object, found: Findings) -> None:
        raise TypeError("unhashable type: 'list'")

    kinds = [replace(kind, check=stumble) if kind.name == "parity" else kind for kind in KINDS]
    monkeypatch.setattr("prefixwise.bench.kinds.registry.KINDS", kinds)
    path = write_all(tmp_path) / SAMPLES["parity"][0]
    with pytest.raises(TypeError, match="unhashable"):
        check_file(path)


@pytest.mark.parametrize("kind", [kind.name for kind in MODELED_KINDS])
def test_a_file_that_lacks_a_field_is_invalid_and_not_skipped(tmp_path: Path, kind: str) -> None:
    model = kind_named(kind).model
    assert model is not None
    required = [field.alias or name for name, field in model.model_fields.items() if field.is_required()]
    for name in required or ["model"]:
        report = check(tmp_path, kind, **{name: GONE})
        assert (report.kind, report.is_valid) == (kind, False), name


def test_a_file_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    (error,) = reported(check_file(tmp_path))
    assert error.startswith("the file: expected one that can be read, got ")


@pytest.mark.parametrize(("kind", "field"), [("comparison", "generated_at_utc"), ("parity", "model")])
def test_what_the_contract_does_not_list_need_not_be_there(tmp_path: Path, kind: str, field: str) -> None:
    assert reported(check(tmp_path, kind, **{field: GONE})) == []


@pytest.mark.parametrize("content", ["[]", "5", '{"name": "someone else\'s"}'])
def test_json_of_another_kind_is_odd_where_nothing_is_expected_of_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "package.json"
    path.write_text(content)
    anything, a_matrix = check_file(path), check_file(path, ["score-matrix", "ops-matrix"])
    assert (anything.kind, anything.is_valid) == (None, True)
    assert not check_file(path, is_artifact=True).is_valid
    assert warned(anything) == ["the file: expected an artifact, got JSON of another kind, which was not checked"]
    assert reported(a_matrix) == [
        "the file: expected an artifact of kind score-matrix or ops-matrix, got one that is not known"
    ]


def test_a_version_that_is_not_known_is_invalid(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps({**SAMPLES["score-matrix"][1](), "schema_version": "score_matrix_v2"}))
    (error,) = reported(check_file(path))
    assert error.startswith("schema_version: expected one of canonical_score_workload_v1, score_matrix_v1, 1.0, ")
    assert error.endswith(', got "score_matrix_v2"')


def test_an_artifact_of_another_kind_than_expected_is_invalid(tmp_path: Path) -> None:
    path = write_all(tmp_path) / SAMPLES["workload"][0]
    assert reported(check_file(path, ["comparison"])) == [
        "the file: expected an artifact of kind comparison, got workload"
    ]


def test_a_file_that_is_not_there_is_no_finding(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        check_file(tmp_path / "absent.json")


def test_the_files_of_a_folder_are_found_below_it_by_name(tmp_path: Path) -> None:
    for name in ("b.json", "a/c.json", "a/notes.md", "z.json.tmp", ".hidden.json", ".hidden/d.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder.json").mkdir()
    assert [str(path.relative_to(tmp_path)) for path in json_files(tmp_path)] == ["a/c.json", "b.json"]
