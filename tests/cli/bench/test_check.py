from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwise.cli.bench.check import bench_check
from tests.bench.kinds.samples import SAMPLES, edited, write_all
from tests.cli.conftest import Ran
from tests.cli.verb_runner import run_verb

Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """In a folder whose `reports/artifacts/dense-matrix-*` are two with an artifact of every kind."""
    monkeypatch.chdir(tmp_path)
    for day in (1, 2):
        write_all(Path(f"reports/artifacts/dense-matrix-2026021{day}T120000Z"))
    return lambda *args: run_verb(bench_check, capsys, *args)


def in_folders(name: str = "") -> list[str]:
    """As a shell expands reports/artifacts/dense-matrix-*/name."""
    return sorted(f"{folder}/{name}" for folder in Path("reports/artifacts").glob("dense-matrix-*"))


def spoil(path: str, kind: str, **changes: object) -> None:
    Path(path).write_text(json.dumps(edited(SAMPLES[kind][1](), **changes)))


def test_the_handoffs_matrix_command(run: Run) -> None:
    ran = run("--matrix", *in_folders("matrix_results.json"))
    assert ran.status == 0
    assert json.loads(ran.out) == {
        "valid": True,
        "num_files": 2,
        "num_invalid": 0,
        "num_errors": 0,
        "num_warnings": 2,
    }
    assert ran.err.splitlines() == [f"ok       {path}  ops-matrix" for path in in_folders("matrix_results.json")]


def test_the_handoffs_verbose_command(run: Run) -> None:
    ran = run("--all", *in_folders(), "-v")
    assert ran.status == 0
    assert json.loads(ran.out)["num_files"] == 2 * len(SAMPLES)
    path = f"{in_folders()[0]}matrix_results.json"
    assert f"  warning: {path}: results[2].status: expected ok, got failed: out of memory" in ran.err.splitlines()


def test_the_handoffs_json_command(run: Run) -> None:
    ran = run("--all", "reports/artifacts/", "--json")
    report = json.loads(ran.out)
    assert (ran.status, ran.err, ran.out.count("\n")) == (0, "", 1)
    assert report["valid"] is True
    assert [each["kind"] for each in report["files"]].count("parity") == 2
    odd = next(each for each in report["files"] if each["kind"] == "parity")
    assert odd["warnings"] == [
        {"field": "max_abs_diff_jax_multi_vs_torch_serial", "expected": "at most 0.02", "got": "0.25"}
    ]


def test_an_invalid_file_is_named_with_field_expectation_and_value(run: Run) -> None:
    path = in_folders("matrix_results.json")[1]
    spoil(path, "ops-matrix", summary__best_chunk_size=32)
    ran = run("--matrix", *in_folders("matrix_results.json"))
    assert ran.status == 1
    assert json.loads(ran.out)["num_invalid"] == 1
    assert ran.err.splitlines()[1:] == [
        f"invalid  {path}  ops-matrix",
        f"  error: {path}: summary.best_chunk_size: expected 64 (of the highest throughput), got 32",
    ]


def test_an_invalid_file_among_many_is_found(run: Run) -> None:
    spoil(in_folders("comparison.json")[0], "comparison", portable_view__rows__0__correctness__max_abs_diff=0.03)
    report = json.loads(run("--all", "reports", "--json").out)
    (invalid,) = [each for each in report["files"] if not each["valid"]]
    assert invalid["errors"] == [
        {
            "field": "portable_view.rows[0].correctness.pass",
            "expected": "False (by its differences 0.03 and 0.01)",
            "got": "True",
        }
    ]


def test_a_flag_says_what_its_files_must_be(run: Run) -> None:
    workload, parity = in_folders("canonical_workload.json")[0], in_folders("jax_torch_parity_results.json")[0]
    assert run("--workload", workload).status == 0
    assert run("--comparison", in_folders("comparison.json")[0]).status == 0
    assert run("--matrix", in_folders("jax_portable_matrix.json")[0]).status == 0
    wrong = run("--workload", workload, parity)
    assert wrong.status == 1
    assert f"  error: {parity}: the file: expected an artifact of kind workload, got parity" in wrong.err.splitlines()


def test_files_without_a_flag_or_with_several_are_what_they_are(run: Run) -> None:
    workload, *_ = in_folders("canonical_workload.json")
    comparison, *_ = in_folders("comparison.json")
    parity, *_ = in_folders("jax_torch_parity_results.json")
    assert run(parity, workload).status == 0
    assert run("--workload", workload, "--comparison", comparison, parity).status == 0
    assert json.loads(run("--workload", workload, "--workload", workload).out)["num_files"] == 2
    assert json.loads(run("--all", in_folders()[0], parity).out)["num_files"] == len(SAMPLES) + 1


def test_a_file_that_nothing_can_be_made_of_hides_no_other(run: Run) -> None:
    spoiled: dict[str, dict[str, object]] = {
        "comparison.json": {"portable_view__backend_best__jax__winner__client_chunk_size": [1]},
        "jax_portable_matrix.json": {"summary__sweep_recommendation__selected": "fast"},
        "serial_score_eval_results.json": {"isolation__base_scores__0": []},
    }
    kinds = {name: kind for kind, (name, _) in SAMPLES.items()}
    for name, changes in spoiled.items():
        spoil(in_folders(name)[0], kinds[name], **changes)
    Path(in_folders("ab.json")[0]).write_text('{"rounds": NaN}')
    Path(in_folders("load.json")[0]).write_text("[" * 100_000)
    ran = run("--all", "reports", "--json")
    report = json.loads(ran.out)
    assert (ran.status, report["num_files"]) == (1, 2 * len(SAMPLES))
    invalid = [Path(each["path"]).name for each in report["files"] if not each["valid"]]
    assert invalid == sorted([*spoiled, "ab.json", "load.json"])


def test_json_of_others_is_skipped_in_a_folder(run: Run) -> None:
    Path("reports/package.json").write_text('{"name": "theirs"}')
    ran = run("--all", "reports")
    assert ran.status == 0
    assert "skipped  reports/package.json  no artifact" in ran.err.splitlines()
    assert run("--matrix", "reports/package.json").status == 1
    named = run("reports/package.json")
    assert named.status == 1
    assert "the file: expected an artifact, got JSON of another kind" in named.err


def test_a_file_that_was_cut_short_is_invalid(run: Run) -> None:
    Path(in_folders("comparison.json")[0]).write_text('{"schema_version": "cross_ba')
    ran = run("--all", "reports")
    assert ran.status == 1
    assert f"invalid  {in_folders('comparison.json')[0]}  unknown" in ran.err.splitlines()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((), "error: expected --workload, --matrix, --comparison, --all or files, got none"),
        (("--matrix", "absent.json"), "error: no such file or folder: absent.json"),
        (("--all", "absent/"), "error: no such file or folder: absent"),
        (("--all", "reports", "absent.json"), "error: no such file or folder: absent.json"),
        (("--all", "empty"), "error: empty holds no .json file: expected artifacts"),
        (("--matrix", "reports"), "error: expected a file, got a folder: reports"),
        (("--comparison", "reports/artifacts"), "error: expected a file, got a folder: reports/artifacts"),
        (("--matrx", "x.json"), "error: No such option: --matrx"),
    ],
)
def test_bad_arguments_and_missing_files_are_status_2(run: Run, args: tuple[str, ...], error: str) -> None:
    Path("empty").mkdir()
    ran = run(*args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(error)
