from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact, write_artifact
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
from prefixwise.bench.kinds.parity import Parity
from tests.bench.evaluations import multi_evaluation, serial_evaluation
from tests.cli.conftest import Ran
from tests.cli.validate_program import result_of, run_validate

ALIGNED = [[0.5, 0.5], [0.375, 0.625]]  # against multi's [[0.5, 0.5], [0.25, 0.75]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two evaluations in it."""
    write_artifact(tmp_path / "multi.json", multi_evaluation())
    write_artifact(tmp_path / "serial.json", serial_evaluation(aligned=ALIGNED))
    return tmp_path


def run(folder: Path, *args: object) -> Ran:
    outputs = ("--output-multi-vs-serial-json", folder / "mvs.json", "--output-jax-torch-parity-json")
    inputs = ("--multi-json", folder / "multi.json", "--serial-json", folder / "serial.json")
    return run_validate("combine", *inputs, *outputs, folder / "parity.json", *args)


def test_both_halves_are_written_and_summed_up(folder: Path, checkpoint_of: Callable[[str], Path]) -> None:
    ran = run(folder, "--model-path", checkpoint_of("qwen3"))
    assert ran.status == 0, ran.err
    combined = read_artifact(folder / "mvs.json", MultiVsSerial)
    parity = read_artifact(folder / "parity.json", Parity)
    assert combined.aligned_max_abs_diff == 0.125
    assert parity.reference["path"] == str(checkpoint_of("qwen3"))
    assert result_of(ran) == {
        "multi_vs_serial_json": str(folder / "mvs.json"),
        "parity_json": str(folder / "parity.json"),
        "equivalence_max_abs_diff": 0.0,
        "equivalence_query_plus_delimiter_max_abs_diff": 0.125,
        "max_abs_diff_jax_serial_vs_torch_serial": parity.max_abs_diff_jax_serial_vs_torch_serial,
        "speedup_vs_serial_p50": {"1": 1.0, "8": 3.0, "32": 6.0},
    }
    assert "multi vs serial, query + delimiter + item: max 0.125" in ran.err.splitlines()
    assert ran.err.splitlines()[-1] == "32 items: 6.00x as fast as one by one"


def test_a_model_that_cannot_be_found_leaves_the_first_half_and_a_hint(folder: Path) -> None:
    pytest.importorskip("torch")  # the reference needs it
    ran = run(folder)
    assert (ran.status, ran.out) == (1, "")
    error, hint = ran.err.splitlines()
    assert error.startswith("error: 'a-model' is neither a local path nor a model the hub gives us")
    assert hint == "hint: --model-path names the checkpoint that the servers have"
    assert read_artifact(folder / "mvs.json", MultiVsSerial).model == "a-model"
    assert not (folder / "parity.json").exists()


def test_without_transformers_there_is_a_hint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    ran = run(folder)
    assert ran.status == 1
    assert ran.err.splitlines() == [
        "error: the reference needs transformers, and transformers is not installed",
        "hint: pip install transformers torch; for GGUF files accelerate and gguf, too",
    ]


def test_evaluations_in_each_others_place_are_an_error(folder: Path) -> None:
    (folder / "multi.json").replace(folder / "other.json")
    (folder / "serial.json").replace(folder / "multi.json")
    (folder / "other.json").replace(folder / "serial.json")
    ran = run(folder)
    assert (ran.status, ran.err) == (1, "error: expected an evaluation of mode multi, got one of mode serial\n")


def test_a_file_that_is_no_evaluation_is_an_error(folder: Path) -> None:
    (folder / "multi.json").write_text("{}")
    ran = run(folder)
    assert ran.status == 1
    assert ran.err.startswith(f"error: {folder / 'multi.json'} is no EndpointEvaluation: mode: ")
