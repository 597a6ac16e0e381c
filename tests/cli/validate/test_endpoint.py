from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.evaluation import EndpointEvaluation
from tests.bench.wrong_server import wrong_server
from tests.cli.conftest import Ran
from tests.cli.validate_program import result_of, run_validate
from tests.server.server_process import server_process

SMALL = ["--item-counts", "1,2", "--timed-runs", "2", "--query-tokens", "8", "--item-tokens", "4"]


@pytest.fixture(scope="module")
def good() -> Iterator[str]:
    with server_process("--api-key=secret") as running:
        yield running.url


def run(folder: Path, url: str, *args: str) -> Ran:
    fixed = ["endpoint", "--url", url, "--model", "fake-model", "--output-json", str(folder / "out.json"), *SMALL]
    return run_validate(*fixed, "--api-key", "secret", *args)


@pytest.mark.parametrize("mode", ["multi", "serial"])
def test_the_artifact_is_written_and_summed_up(tmp_path: Path, good: str, mode: str) -> None:
    ran = run(tmp_path, f"{good}/v1/score", "--mode", mode)
    assert ran.status == 0, ran.err
    found = read_artifact(tmp_path / "out.json", EndpointEvaluation)
    assert (found.mode, found.url, found.labels, found.delimiter) == (mode, f"{good}/v1/score", [0, 1], 511)
    assert (found.semantic_alignment is None) == (mode == "multi")
    assert found.server_config["model"]["vocab_size"] == 512
    assert result_of(ran) == {
        "output_json": str(tmp_path / "out.json"),
        "mode": mode,
        "model": "fake-model",
        "labels": [0, 1],
        "delimiter": 511,
        "same_length_mutation_max_abs_diff": 0.0,
        "changed_length_mutation_max_abs_diff": 0.0,
        "failures": {},
        "p50_sec": {count: found.performance[count].p50_sec for count in ("1", "2")},
    }


def test_the_server_and_the_choice_of_tokens_are_told_first(tmp_path: Path, good: str) -> None:
    first, *lines = run(tmp_path, good, "--mode", "multi").err.splitlines()
    assert first == f"server {good}: fake-model, fake, cpu, float32"
    assert lines[:5] == [
        "note: the default delimiter_token_id 151643 is not in the vocabulary of fake-model (512): 511, its last id",
        "note: the default label_token_ids [9454, 2753] is not in the vocabulary of fake-model (512): [0, 1], "
        "its first ordinary tokens",
        "[1/3] validate multi endpoint: isolation",
        "[2/3] validate multi endpoint: 1 items",
        "[3/3] validate multi endpoint: 2 items",
    ]
    assert lines[5:7] == [
        f"a neighbour of {length} length changes a score by at most 0" for length in ("the same", "another")
    ]
    assert [line.partition(": ")[0] for line in lines[7:]] == ["1 item", "2 items"]
    assert all(line.endswith(" ms (p50)") for line in lines[7:])


def test_the_earlier_systems_options_are_taken(tmp_path: Path, good: str) -> None:
    output = tmp_path / "out.json"
    fixed = ("endpoint", "--mode", "multi", "--url", good, "--api-key", "secret", "--output-json", str(output))
    ran = run_validate(*fixed, "--item-counts", "1", "--rounds", "3", "--warmup", "2", "--timeout", "60")
    assert ran.status == 0, ran.err
    found = read_artifact(output, EndpointEvaluation)
    assert found.model == "fake-model"  # what the server calls it
    assert (found.settings["timed_runs"], found.settings["warmup_runs"]) == (3, 2)
    assert len(found.performance["1"].latencies_sec) == 3
    assert run_validate(*fixed, "--timeout", "0").status == 2


def test_given_tokens_are_taken(tmp_path: Path, good: str) -> None:
    ran = run(tmp_path, good, "--mode", "serial", "--label-token-ids", "1,2,3", "--delimiter-token-id", "7")
    assert (result_of(ran)["labels"], result_of(ran)["delimiter"]) == ([1, 2, 3], 7)
    assert "note:" not in ran.err


@pytest.mark.parametrize("given", [("--label-token-ids", "3,512"), ("--delimiter-token-id", "512")])
def test_given_tokens_that_the_model_lacks_are_an_error(tmp_path: Path, good: str, given: tuple[str, ...]) -> None:
    ran = run(tmp_path, good, "--mode", "multi", *given)
    assert (ran.status, ran.out) == (1, "")
    assert "error: labels and delimiter must be from 0 to 511 for this server, got 512" in ran.err
    assert not (tmp_path / "out.json").exists()


def test_a_vocabulary_size_that_is_given_counts(tmp_path: Path, good: str) -> None:
    run(tmp_path, good, "--mode", "multi", "--vocab-size", "100")
    found = read_artifact(tmp_path / "out.json", EndpointEvaluation)
    assert (found.delimiter, found.settings["vocab_size"]) == (99, 100)
    assert max(token for item in found.isolation.item_ids for token in item) < 99


def test_a_server_that_fails_is_one_line_and_no_artifact(tmp_path: Path, good: str) -> None:
    with wrong_server(good, "short") as url:
        ran = run(tmp_path, url, "--mode", "multi")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.splitlines()[-1] == "error: bad_response: expected 8 rows of scores, got 7 rows"
    assert not (tmp_path / "out.json").exists()


def test_an_item_count_that_fails_is_told_and_the_rest_is_kept(tmp_path: Path, good: str) -> None:
    with wrong_server(good, "oom", only_items=2) as url:
        ran = run(tmp_path, url, "--mode", "multi", "--item-counts", "1,2,3")
    assert ran.status == 1
    failure = result_of(ran)["failures"]["2"]
    assert failure.startswith("oom: HTTP 500")
    assert ran.err.splitlines()[-1] == f"error: 2 items: {failure}"
    found = read_artifact(tmp_path / "out.json", EndpointEvaluation)
    assert (list(found.performance), found.failures) == (["1", "3"], {"2": failure})


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (
            ("--mode", "multi", "--label-token-ids=5"),
            "error: --label-token-ids must be two or more, each once, got '5'",
        ),
        (
            ("--mode", "multi", "--label-token-ids=5,5"),
            "error: --label-token-ids must be two or more, each once, got '5,5'",
        ),
        (("--mode", "both"), "Invalid value for '--mode'"),
        (("--mode", "multi", "--item-counts", "1,x"), "error: --item-counts must be integers like 1,2,4, got '1,x'"),
        (("--mode", "multi", "--item-counts", "0,1"), "error: --item-counts must be 1 or more each, got '0,1'"),
        (("--mode", "multi", "--label-token-ids=-1,2"), "error: --label-token-ids must be 0 or more each, got '-1,2'"),
        (("--mode", "multi", "--timed-runs", "0"), "Invalid value for '--timed-runs'"),
    ],
)
def test_bad_arguments_are_a_usage_error(tmp_path: Path, args: tuple[str, ...], error: str) -> None:
    ran = run(tmp_path, "http://127.0.0.1:9", *args)
    assert (ran.status, ran.out) == (2, "")
    assert error in ran.err
