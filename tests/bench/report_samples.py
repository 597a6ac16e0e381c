"""A comparison to report on, with metrics one can check in one's head: six items, three chunk sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefixwise.bench.files import write_artifact
from prefixwise.bench.kinds.base import BackendName
from prefixwise.bench.kinds.comparison.inputs import ReportInputs, ReportPaths, read_report_inputs
from prefixwise.bench.kinds.multi_vs_serial import (
    AlignedEquivalence,
    Equivalence,
    IsolationSummary,
    MultiVsSerial,
    Speedup,
)
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.kinds.score_matrix import MatrixRow, make_row
from prefixwise.bench.rules import Bounds
from prefixwise.bench.run.comparison import compare, read_inputs
from prefixwise.bench.run.matrix import SweepOptions
from tests.bench.matrix_samples import NUM_ITEMS, SCORES, bad_run, good_row, good_run, shifted, write_matrix

SIZES = (1, 2, 6)
# In chunks of 1 both have 6 items in 120 and 60 ms; of 2 JAX fails once of twice; of 6 PyTorch always fails.
JAX_ROWS = (
    good_row(1, 120.0, shifted(0.001)),
    make_row(2, NUM_ITEMS, [good_run(0, 30.0), bad_run(1)], shifted(0.004)),
    good_row(6, 20.0),
)
PYTORCH_ROWS = (
    good_row(1, 60.0),
    good_row(2, 40.0),
    make_row(6, NUM_ITEMS, [bad_run(0, "oom", "<b>out | of memory</b>")] * 2, None),
)


def write_comparison(
    folder: Path,
    jax: Sequence[MatrixRow] = JAX_ROWS,
    pytorch: Sequence[MatrixRow] = PYTORCH_ROWS,
    confirmed: Sequence[MatrixRow] = (),
    pytorch_confirmed: Sequence[MatrixRow] = (),
) -> Path:
    """With its matrices beside it; `confirmed` are JAX's."""
    ours = _write(folder, "jax", jax, confirmed, {"name": "TPU <v6e>", "versions": {"jax": "0.10"}})
    theirs = _write(folder, "pytorch", pytorch, pytorch_confirmed, {"name": "G4", "versions": {"torch": "2.8"}})
    path = folder / "comparison.json"
    write_artifact(path, compare(read_inputs(ours, theirs, None, None), Bounds()))
    return path


def _write(
    folder: Path,
    backend: BackendName,
    rows: Sequence[MatrixRow],
    confirmed: Sequence[MatrixRow],
    hardware: dict[str, object],
) -> Path:
    options = SweepOptions(backend, "portable", SIZES, timed_runs=2, hardware=f"{backend} machine")
    return write_matrix(folder / f"{backend}_matrix.json", options, rows, confirmed, hardware=hardware)


def sample_inputs(folder: Path) -> ReportInputs:
    return read_report_inputs(ReportPaths(write_comparison(folder)))


def agreeing_rows(total_ms: float, by: float = 0.0) -> tuple[MatrixRow, ...]:
    """All sizes work and take the same time."""
    return tuple(good_row(size, total_ms, shifted(by) if by else SCORES) for size in SIZES)


def multi_vs_serial(speedup: float = 4.0) -> MultiVsSerial:
    return MultiVsSerial(
        model="fake-model",
        multi_url="http://127.0.0.1:1",
        serial_url="http://127.0.0.1:2",
        labels=[3, 5],
        equivalence=Equivalence(max_abs_diff=0.5, mean_abs_diff=0.25),
        equivalence_query_plus_delimiter=AlignedEquivalence(max_abs_diff=0.0125, mean_abs_diff=0.001),
        isolation=IsolationSummary(same_length_mutation_max_abs_diff=0.0, changed_length_mutation_max_abs_diff=0.0),
        performance={
            "32": Speedup(speedup_vs_serial_p50=speedup, multi_p50_sec=0.05, serial_p50_sec=0.05 * speedup),
        },
    )


def parity(largest: float = 0.004) -> Parity:
    return Parity(
        model="fake-model",
        max_abs_diff_jax_serial_vs_torch_serial=largest,
        max_abs_diff_jax_multi_vs_torch_serial=0.03,
        max_abs_diff_jax_multi_vs_torch_multi_semantic=0.005,
    )
