"""`prefixwise validate quantization` with servers of its own: a quantised copy passes, another model does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.quantization import QuantizationCheck
from prefixwise.bench.run.check import check_file
from prefixwise.bench.run.report import report_of
from tests.checkpoints import make_hf_checkpoint
from tests.cli.conftest import Ran
from tests.cli.validate_program import result_of, run_validate
from tests.quantised_checkpoints import make_fp8

SMALL = ("--num-requests", "2", "--query-tokens", "12", "--num-items", "12", "--item-tokens", "3")
SERVER = "--server-flag=--dtype float32 --device cpu --backend torch --warmup none"


@pytest.fixture(scope="module")
def dense(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


def run(model: object, folder: Path, *more: object) -> Ran:
    return run_validate("quantization", model, SERVER, "--output-json", folder / "gate.json", *more)


def test_a_quantised_copy_passes_on_the_canonical_workload(dense: Path, tmp_path: Path) -> None:
    folder = make_fp8(dense, tmp_path / "fp8")
    ran = run(folder, tmp_path, "--reference", dense, *SMALL, "--output-markdown", tmp_path / "gate.md")
    check = read_artifact(tmp_path / "gate.json", QuantizationCheck)
    assert (ran.status, check.all_pass, result_of(ran)["failed"]) == (0, True, []), ran.err
    assert 0 < check.metrics.max_abs_diff < 0.1
    assert [len(each.scores) for each in check.requests] == [12, 12]
    assert check.model_server["checkpoint_quantization"] == "fp8 (e4m3, blocks of 128 x 128)"
    assert check.reference_server["checkpoint_quantization"] is None
    assert {check.model_server[f"{what}_dtype"] for what in ("kv_cache", "prefix_attention")} == {"float32"}
    assert not check_file(tmp_path / "gate.json").errors
    assert "fp8 (e4m3, blocks of 128 x 128)" in (tmp_path / "gate.md").read_text()
    assert report_of(check, "gate.json").passed


def test_another_model_fails_on_ones_own_requests(dense: Path, tmp_path: Path) -> None:
    other = make_hf_checkpoint(tmp_path / "other", "qwen3", seed=1)
    lines = [{"query": [1, 2, 3], "items": [[4], [5], [6, 7]], "label_token_ids": [8, 9], "apply_softmax": True}] * 2
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run(other, tmp_path, "--reference", dense, "--requests", requests)
    check = read_artifact(tmp_path / "gate.json", QuantizationCheck)
    assert (ran.status, check.all_pass) == (1, False)
    assert "max_abs_diff" in result_of(ran)["failed"]
    assert "max_abs_diff: max_abs_diff is " in ran.err
    assert [each.request_id for each in check.requests] == ["line 1", "line 2"]
    assert not report_of(check, "gate.json").passed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no requests: expected one JSON object per line"),
        ('{"items": []}', "requests.jsonl:1: expected a request with a list of items"),
        ("[1", "requests.jsonl:1: expected a JSON object"),
    ],
)
def test_requests_that_are_none(text: str, said: str, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(text)
    ran = run(dense, tmp_path, "--reference", "embedded", "--requests", tmp_path / "requests.jsonl")
    assert ran.status != 0
    assert said in ran.err


def test_a_model_is_not_compared_with_itself(dense: Path, tmp_path: Path) -> None:
    ran = run(dense, tmp_path)
    assert ran.status == 2
    assert "expected --reference MODEL, or other flags for one of both servers" in ran.err
