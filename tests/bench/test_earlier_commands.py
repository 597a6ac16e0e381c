"""The commands of the earlier system's runbooks, with the programs' names replaced, run against real servers.

The fixture has them as they are written there, but for one port: both runbooks have a :30011, and here the serial
server is at :30012. The model is a tiny Qwen3 with the full vocabulary, in a throw-away cache under the name
`Qwen/Qwen3-0.6B`.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from prefixwise.bench.processes import local_server
from tests.bench.earlier_files import best_native_row
from tests.checkpoints import make_hf_checkpoint
from tests.cli.conftest import Ran
from tests.cli.prefixwise_program import exit_status
from tests.models.hub_cache import add_to_cache

FIXTURE = Path(__file__).parents[1] / "fixtures" / "earlier_commands.txt"
MODEL = "Qwen/Qwen3-0.6B"
PROGRAMS = {
    "generate_canonical_score_workload.py": "bench workload",
    "run_score_matrix_jax.py": "bench matrix --backend-name jax",
    "run_score_matrix_pytorch.py": "bench matrix --backend-name pytorch",
    "compare_score_matrix_results.py": "bench compare",
    "render_jax_vs_pytorch_final_report.py": "bench report",
    "evaluate_score_endpoint.py": "validate endpoint",
    "combine_multi_item_eval.py": "validate combine",
    "validate_score_artifacts.py": "bench check",
}
# Options of the earlier programs that the runbooks do not use.
MATRIX_OPTIONS = (
    "--guardrail-ratio 1.5 --cost-per-hour 2.5 --delimiter-token-id 151643 "
    "--correctness-threshold-max-abs 0.02 --correctness-threshold-mean-abs 0.01"
)
EVALUATION_OPTIONS = "--item-counts 1,2 --rounds 1 --warmup 1 --timeout 120 --query-tokens 24"
# What makes the workload small enough for every day.
REDUCED = {
    "--query-tokens 2000": "--query-tokens 24",
    "--num-items 500": "--num-items 6",
    "--item-tokens 20": "--item-tokens 3",
    "--client-chunk-sizes 1,2,4,8,16,32,64,128,256,500": "--client-chunk-sizes 2,6",
    "--timed-runs 5": "--timed-runs 2",
    "--timed-runs-confirm 7": f"--timed-runs-confirm 2 {MATRIX_OPTIONS}",
    "--mode multi": f"--mode multi {EVALUATION_OPTIONS}",
    "--mode serial": f"--mode serial {EVALUATION_OPTIONS}",
    "combine --multi-json": f"combine --torch-model {MODEL} --multi-json",
}
MULTI = "--multi-item-scoring-delimiter 151643 --disable-radix-cache --chunked-prefill-size -1 --trust-remote-code"
SERVERS = {
    30010: f"{MULTI} --multi-item-scoring-chunk-size 500 --multi-item-mask-impl auto",
    30011: f"{MULTI} --multi-item-scoring-chunk-size 64 --multi-item-segment-fallback-threshold 32768",
    30020: MULTI,
    30012: "--algorithm serial --disable-radix-cache",
}
SHARED = f"--model-path {MODEL} --dtype float32 --tp-size 1 --device cpu"


def commands() -> list[str]:
    """In our phrase: one line each."""
    found = []
    for block in FIXTURE.read_text(encoding="utf-8").strip().split("\n\n"):
        line = " ".join(block.replace("\\\n", " ").split())
        _, path, rest = line.split(" ", 2)
        found.append(f"{PROGRAMS[Path(path).name]} {rest}")
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the model is, for this process and its children."""
    home = tmp_path_factory.mktemp("hf")
    source = make_hf_checkpoint(home / "source", "qwen3", vocab_size=151_936, max_position_embeddings=16_384)
    add_to_cache(home, MODEL, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
        yield home


def run_here(arguments: list[str], folder: Path) -> Ran:
    """In this process, which has imported PyTorch and transformers once for all of them."""
    out, err = StringIO(), StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        status = exit_status(*arguments)
    return Ran(status, out.getvalue(), err.getvalue())


def run_apart(arguments: list[str], folder: Path) -> Ran:
    command = [sys.executable, "-m", "prefixwise", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def run_all(
    folder: Path, lines: list[str], backends: dict[int, str], run: Callable[[list[str], Path], Ran]
) -> dict[str, Ran]:
    """One after the other, in one folder, with servers at other ports than those written."""
    done = {}
    with ExitStack() as stack:
        urls = {}
        for port, flags in SERVERS.items():
            arguments = shlex.split(f"{SHARED} --backend {backends[port]} {flags}")
            urls[port] = stack.enter_context(local_server(arguments, folder / f"{port}.log")).url
        for line in lines:
            for port, url in urls.items():
                line = line.replace(f"http://127.0.0.1:{port}", url)
            done[line] = run(shlex.split(line.replace("${TS}", "20260207")), folder)
    return done


def check(folder: Path, done: dict[str, Ran]) -> None:
    for line, ran in done.items():
        assert ran.status == 0, f"{line}\n{ran.err}"
        assert json.loads(ran.out.splitlines()[-1]), line
    artifacts = folder / "reports/artifacts/jax-vs-pytorch-multi-item-20260211"
    for backend in ("jax", "pytorch"):
        row = best_native_row(json.loads((artifacts / f"{backend}_best_native_matrix.json").read_text()))
        assert row is not None and row["status"] == "ok"
    report = (folder / "reports" / "jax-vs-pytorch-multi-item-comparison-2026-02-11.md").read_text(encoding="utf-8")
    assert "2026-02-11" in report
    parity = json.loads((folder / "docs/features/reports/jax_torch_parity_results_20260207.json").read_text())
    assert parity["max_abs_diff_jax_serial_vs_torch_serial"] < 1e-4
    combined = json.loads((folder / "docs/features/reports/multi_vs_serial_eval_results_20260207.json").read_text())
    assert combined["isolation"]["same_length_mutation_max_abs_diff"] == 0.0
    assert combined["isolation"]["changed_length_mutation_max_abs_diff"] == 0.0
    assert combined["equivalence_query_plus_delimiter"]["max_abs_diff"] < 1e-4


def test_every_command_is_there() -> None:
    verbs = [" ".join(line.split()[:2]) for line in commands()]
    assert len(verbs) == 13
    assert set(verbs) == {" ".join(name.split()[:2]) for name in PROGRAMS.values()}


@pytest.mark.slow
def test_they_run_on_a_small_workload(tmp_path: Path, home: Path) -> None:
    lines = commands()
    for written, reduced in REDUCED.items():
        assert any(written in line for line in lines)
        lines = [line.replace(f"{written} ", f"{reduced} ") for line in lines]
    check(tmp_path, run_all(tmp_path, lines, dict.fromkeys(SERVERS, "torch"), run_here))


@pytest.mark.slow
def test_they_run_as_they_are_written(tmp_path: Path, home: Path) -> None:
    backends = {port: "torch" if port == 30020 else "jax" for port in SERVERS}
    check(tmp_path, run_all(tmp_path, commands(), backends, run_apart))
