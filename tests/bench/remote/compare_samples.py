"""Comparisons of backends to work with: a small plan, and matrices as a run with it would have left them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefixwise._version import __version__
from prefixwise.bench.files import read_artifact, write_artifact
from prefixwise.bench.kinds.score_matrix import summarise
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.remote.compare.plan import MATRIX_STEPS, ComparePlan, matrix_spec
from prefixwise.bench.remote.folders import CANONICAL_WORKLOAD
from prefixwise.bench.remote.on_target.client_matrix import measured_by
from prefixwise.bench.run.matrix import SweepOptions
from prefixwise.bench.run.workload import make_workload
from prefixwise.bench.tokens import token_facts
from tests.bench.matrix_samples import bad_row, begun_matrix, good_row, shifted

# What an agent tells of its machine.
FACTS: dict[str, Any] = {
    "prefixwise": __version__,
    "packages": {"jax": True, "torch": True},
    "devices": ["jax: NVIDIA H200", "torch: cpu"],
    "is_writable": True,
}


def small_plan(model: Path | str) -> ComparePlan:
    """Six items, one call or six; runs enough for a connection to be cut in the middle of them."""
    return ComparePlan(
        model=str(model),
        dtype="float32",
        query_tokens=24,
        num_items=6,
        item_tokens=3,
        client_chunk_sizes=(6, 1),
        warmup_runs=0,
        timed_runs=10,
        timed_runs_confirm=1,
        timeout_sec=60.0,
        server_flags=("--device=cpu",),
        jax_server_flags=("--warmup", "none"),
    )


def write_matrices(folder: Path, plan: ComparePlan, *, jax_drift: float = 0.0, failed: str = "") -> None:
    """All four, finished; JAX takes 10 ms and PyTorch 20. `failed` names one in which no row worked."""
    folder.mkdir(parents=True)
    write_artifact(folder / CANONICAL_WORKLOAD, make_workload(plan.workload_options, token_facts(plan.model)))
    workload = read_artifact(folder / CANONICAL_WORKLOAD, Workload)
    for step in MATRIX_STEPS:
        options = SweepOptions(step.backend, step.view, plan.sizes)
        total_ms, drift = (10.0, jax_drift) if step.backend == "jax" else (20.0, 0.0)
        rows = [good_row(size, total_ms * 6 / size, shifted(drift)) for size in plan.sizes]
        if step.name == failed:
            rows = [bad_row(size) for size in plan.sizes]
        update = {
            "results": rows,
            "summary": summarise(rows, [], confirms=False),
            "complete": True,
            "notes": [measured_by(matrix_spec(plan, step, workload, ""))],
        }
        write_artifact(
            folder / step.file_name, begun_matrix(folder / CANONICAL_WORKLOAD, options).model_copy(update=update)
        )
