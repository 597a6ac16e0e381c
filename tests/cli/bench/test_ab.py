"""`bench ab` from the command line, on a small model in float32: every variant gives the same scores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import typer

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.ab import AbResult
from prefixwise.cli.bench.ab import CompareName, _one_dtype, bench_ab
from prefixwise.cli.engine_options import DtypeName
from tests.cli.conftest import Ran, RunMain

SMALL = ("--query-tokens=150", "--num-items=6", "--item-tokens=5")
PLACE = ("--dtype=float32", "--server-args=--device cpu --backend torch")
NO_MODEL = ("--dtype=float32", "--server-args=--device cpu --backend fake")
Bench = Callable[..., Ran]


@pytest.fixture
def bench(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> Bench:
    app = typer.Typer()
    app.command()(bench_ab)
    monkeypatch.setattr("prefixwise.cli.main.app", app)
    monkeypatch.setenv("XLA_FLAGS", "")  # as a user's
    return run_main


def test_algorithms_on_one_server(bench: Bench, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    model, path, page = checkpoint_of("qwen3"), tmp_path / "ab.json", tmp_path / "ab.md"
    command = (
        "--compare=algorithm",
        f"--model={model}",
        *SMALL,
        *PLACE,
        "--rounds=3",
        f"--log-dir={tmp_path}",
        "--api-key=secret",
    )
    ran = bench(*command, f"--output-json={path}", f"--output-markdown={page}")
    assert ran.status == 0, ran.err
    result = read_artifact(path, AbResult)
    assert [variant.name for variant in result.variants] == ["packed", "prefill_extend", "serial"]
    assert [len(variant.runs) for variant in result.variants] == [9, 9, 9]
    assert [variant.scores_agree for variant in result.variants] == [True] * 3
    # Bits are equal here: what is configured says so.
    assert result.variants[0].server_config["configuration"]["algorithms_bit_equal"] is True
    assert [each.scores_vs_first and each.scores_vs_first.max_abs_diff for each in result.variants] == [0.0] * 3
    assert [log.name for log in tmp_path.glob("*.log")] == ["server-0.log"]
    assert "SIGTERM: shutting down" in (tmp_path / "server-0.log").read_text()
    said = json.loads(ran.out.splitlines()[-1])
    assert (said["compare"], said["rounds"], said["output_json"]) == ("algorithm", 3, str(path))
    assert "\n## Variants: packed vs prefill_extend vs serial\n" in page.read_text()
    lines = ran.err.splitlines()
    assert lines[0] == "ab: --multi-item-mask-impl auto"
    assert lines[1].startswith("server http://127.0.0.1:")
    assert [line.split()[0] for line in lines[-5:]] == ["variant", "packed", "prefill_extend", "serial", "note:"]
    assert [line.split()[-1] for line in lines[-4:-1]] == ["agree"] * 3


def test_masks_on_a_server_each_as_the_environment_says(
    bench: Bench, checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTI_ITEM_MASK_IMPL", "segment")
    monkeypatch.setenv("MULTI_ITEM_BENCH_WARMUP_RUNS", "0")
    monkeypatch.setenv("MULTI_ITEM_BENCH_TIMED_RUNS", "2")
    path = tmp_path / "ab.json"
    model = f"--model={checkpoint_of('qwen3')}"
    ran = bench("--compare=mask", model, *SMALL, *NO_MODEL, "--cold", f"--output-json={path}")
    assert ran.status == 0, ran.err
    result = read_artifact(path, AbResult)
    assert (result.rounds, result.warmup_runs, result.cached) == (2, 0, False)
    segment, dense = result.variants
    assert (segment.name, dense.name) == ("segment", "dense")
    assert [each.server_config["configuration"]["mask"] for each in result.variants] == ["segment", "dense"]
    assert segment.request_fields == dense.request_fields == {"algorithm": "packed"}
    assert dense.scores_vs_first is not None and dense.scores_vs_first.max_abs_diff <= 1e-5
    assert dense.scores_vs_first.num_compared == 6 * 2
    assert dense.speed_vs_first is not None and dense.speed_vs_first.num_rounds == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compare=algorithm", "--algorithm=packed"), "--algorithm is what is compared"),
        (("--compare=mask", "--variants=dense"), "--variants must be two or more"),
        (("--compare=mask", "--variants=dense,segment", "--mask=segment"), "--mask is the baseline of masks"),
        (("--compare=chunk-size", "--variants=8,many"), "numbers like 8,32,0"),
        (("--compare=mask", "--server-args='"), "--server-args must be flags as in a shell"),
        (("--compare=mask", "--correctness-threshold-max-abs=inf"), "expected a finite number, got inf"),
        (("--compare=everything",), "--compare"),
        ((), "--compare"),
    ],
)
def test_options_that_cannot_be_meant_are_misuse(bench: Bench, options: tuple[str, ...], message: str) -> None:
    ran = bench(*options)
    assert ran.status == 2
    assert message in ran.err.splitlines()[0]


def test_an_interrupt_keeps_the_rounds_that_are_finished(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    """Until then the server asks for the key that the client was given."""
    path = tmp_path / "ab.json"
    options = ("--compare=algorithm", "--variants=packed,serial", "--rounds=1000", "--api-key=secret")
    command = [
        sys.executable,
        "-m",
        "prefixwise",
        "bench",
        "ab",
        f"--model={checkpoint_of('qwen3')}",
        *SMALL,
        *NO_MODEL,
    ]
    process = subprocess.Popen(
        [*command, *options, f"--output-json={path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        url = line.split()[1].rstrip(":") if line.startswith("server ") else url
        if "round 4," in line:
            break
    assert httpx.post(f"{url}/v1/score", json={}).status_code == 401
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    result = read_artifact(path, AbResult)
    assert 3 <= result.rounds < 1000 and result.cut_short
    assert result.notes[0] == f"cut short: {result.rounds} of 1000 rounds were finished"
    assert [len(variant.runs) for variant in result.variants] == [3 * result.rounds] * 2
    assert json.loads(out.splitlines()[-1])["cut_short"] is True


@pytest.mark.parametrize(
    ("compare", "given", "used"),
    [("backend", "auto", "float32"), ("backend", "bfloat16", "bfloat16"), ("algorithm", "auto", "auto")],
)
def test_backends_are_compared_in_one_dtype(
    compare: CompareName, given: DtypeName, used: DtypeName, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _one_dtype(compare, given) == used
    assert ("both backends in float32" in capsys.readouterr().err) == (given != used)
