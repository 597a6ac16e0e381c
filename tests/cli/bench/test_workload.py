from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.run.check import check_file
from prefixwise.cli.bench.workload import bench_workload
from tests.cli.conftest import Ran
from tests.cli.verb_runner import run_verb

Run = Callable[..., Ran]
# Step 1 of the runbook, all but the file.
RUNBOOK = (
    *("--model", "Qwen/Qwen3-0.6B", "--query-tokens", "2000", "--num-items", "500", "--item-tokens", "20"),
    *("--label-token-ids", "9454,2753", "--delimiter-token-id", "151643"),
)
SMALL = ("--query-tokens", "5", "--num-items", "3", "--item-tokens", "4")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """On a machine whose hub cache is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return lambda *args: run_verb(bench_workload, capsys, *args)


def test_the_runbooks_command_makes_the_contract_workload(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "reports" / "artifacts" / "canonical_workload.json"
    ran = run(*RUNBOOK, "--output", str(path))
    assert ran.status == 0
    assert json.loads(ran.out) == {
        "output": str(path),
        "model": "Qwen/Qwen3-0.6B",
        "checksums": {
            "canonical_score_request_000_sha256": "2ce1f40deff33c00aae53453d788cc81265ba28491ff77172d24ae155dc8760a"
        },
    }
    report = check_file(path, ["workload"])
    assert (report.errors, report.warnings) == ((), ())


def test_without_arguments_it_is_the_same_workload(run: Run, tmp_path: Path) -> None:
    said, defaults = run(*RUNBOOK, "--output", str(tmp_path / "a.json")), run("--output-json", str(tmp_path / "b.json"))
    assert json.loads(said.out)["checksums"] == json.loads(defaults.out)["checksums"]


def test_it_says_where_the_vocabulary_comes_from(run: Run, tmp_path: Path) -> None:
    ran = run(*SMALL, "--output", str(tmp_path / "w.json"))
    first, last = ran.err.splitlines()
    assert first == (
        "Qwen/Qwen3-0.6B: vocabulary of 151936; "
        "the token pool comes from what is known of it, as it is not on this machine"
    )
    assert last == f"{tmp_path / 'w.json'}: 1 x (query of 5 tokens, 3 items of 4)"
    one = run(*SMALL, "--num-items", "1", "--output", str(tmp_path / "one.json"))
    assert one.err.endswith(": 1 x (query of 5 tokens, 1 item of 4)\n")
    source = read_artifact(tmp_path / "w.json", Workload).tokenizer_source
    assert source == "what is known of it, as it is not on this machine"


def test_a_default_that_the_model_does_not_have_is_replaced_and_told(run: Run, tmp_path: Path) -> None:
    ran = run(*SMALL, "--model", "embedded", "--output", str(tmp_path / "w.json"))
    workload = read_artifact(tmp_path / "w.json", Workload)
    assert (workload.delimiter_token_id, workload.label_token_ids) == (2, [9454, 2753])
    reported = (
        "the default delimiter_token_id 151643 is not in the vocabulary of SmolLM2-135M-Instruct.Q4_1 (49152): "
        "2, its end of text"
    )
    assert workload.notes == [reported]
    assert f"warning: {reported}" in ran.err.splitlines()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--delimiter-token-id", "151643"), "delimiter_token_id: expected ids from 0 to 49151, the vocabulary of"),
        (("--label-token-ids", "9454,49152"), "label_token_ids: expected ids from 0 to 49151, the vocabulary of"),
        (("--label-token-ids", "yes,no"), "--label-token-ids must be integers like 1,2,4, got 'yes,no'"),
        (("--label-token-ids", "5,5"), "--label-token-ids must be different ids, got '5,5'"),
        (("--num-items", "0"), "Invalid value for '--num-items'"),
    ],
)
def test_what_was_given_and_cannot_be_is_a_usage_error(
    run: Run, tmp_path: Path, args: tuple[str, ...], error: str
) -> None:
    ran = run(*SMALL, "--model", "embedded", *args, "--output", str(tmp_path / "w.json"))
    assert (ran.status, ran.out) == (2, "")
    assert f"error: {error}" in ran.err
    assert not (tmp_path / "w.json").exists()


def test_one_label_alone_is_worth_a_note(run: Run, tmp_path: Path) -> None:
    ran = run(*SMALL, "--label-token-ids", "5", "--output", str(tmp_path / "w.json"))
    reported = "there is one label: with softmax over one label every score is 1.0"
    assert ran.status == 0
    assert f"warning: {reported}" in ran.err.splitlines()
    assert read_artifact(tmp_path / "w.json", Workload).notes == [reported]


def test_a_model_of_which_nothing_is_known_is_one_clear_error(run: Run, tmp_path: Path) -> None:
    ran = run("--model", "someone/absent", "--output", str(tmp_path / "w.json"))
    error, hint = ran.err.splitlines()
    assert ran.status == 1
    assert error.startswith("error: 'someone/absent' is not on this machine, and nothing is known of its tokenizer")
    assert hint.startswith("hint: `prefixwise models` lists")


def test_requests_and_seed(run: Run, tmp_path: Path) -> None:
    def checksums(*args: str) -> dict[str, str]:
        found: dict[str, str] = json.loads(run(*SMALL, *args, "--output", str(tmp_path / "w.json")).out)["checksums"]
        return found

    one, two, other = checksums(), checksums("--num-requests", "2"), checksums("--seed", "7")
    assert [*two] == ["canonical_score_request_000_sha256", "canonical_score_request_001_sha256"]
    assert two["canonical_score_request_000_sha256"] == one["canonical_score_request_000_sha256"]
    assert other != one


def test_a_file_that_cannot_be_written_is_one_clear_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    ran = run(*SMALL, "--output", str(tmp_path / "file" / "w.json"))
    assert ran.status == 1
    assert "error: " in ran.err and "cannot be written" in ran.err
