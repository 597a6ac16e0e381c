"""The plan of a cross-backend comparison: its options, its four matrices, and the flags of their servers.

The flags are those of SGLang's runbook. Portable view: one chunk holds all items, on both backends. Best-native view:
JAX with its best chunk size, PyTorch with its server's defaults. Both views disable the prefix cache, because the same
request is sent repeatedly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prefixwise.bench.remote.spec import CHUNK_SIZES, EMBEDDED, ClientMatrixSpec

if TYPE_CHECKING:  # a command line is parsed without the packages of the harness
    from prefixwise.bench.kinds.base import BackendName, EvaluationView
    from prefixwise.bench.kinds.workload import Workload
    from prefixwise.bench.run.workload import WorkloadOptions

# Names of the backends in `prefixwise serve`, which are also their packages.
PACKAGES: Mapping[BackendName, str] = {"jax": "jax", "pytorch": "torch"}
_SEGMENT_FALLBACK_THRESHOLD = 32768
_TIMEOUTS = ("start_timeout_sec",)  # not part of a comparison's identity


@dataclass(frozen=True)
class ComparePlan:
    """The options that determine the results, and the timeout for a server to start."""

    model: str = "Qwen/Qwen3-0.6B"
    dtype: str = "bfloat16"  # the same for both; `auto` depends on the backend
    query_tokens: int = 2000
    num_items: int = 500
    item_tokens: int = 20
    label_token_ids: tuple[int, ...] | None = None
    delimiter_token_id: int | None = None
    client_chunk_sizes: tuple[int, ...] = ()  # empty: CHUNK_SIZES up to the number of items
    warmup_runs: int = 1
    timed_runs: int = 5
    timed_runs_confirm: int = 7
    timeout_sec: float = 180.0
    jax_server_chunk_size: int = 64  # of the best-native view
    server_flags: tuple[str, ...] = ()
    jax_server_flags: tuple[str, ...] = ()
    pytorch_server_flags: tuple[str, ...] = ()
    correctness_threshold_max_abs: float = 0.02
    correctness_threshold_mean_abs: float = 0.01
    start_timeout_sec: float = 900.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The chunk sizes; by default the last one is the number of items."""
        smaller = tuple(size for size in CHUNK_SIZES if size < self.num_items)
        return self.client_chunk_sizes or (*smaller, self.num_items)

    @property
    def workload_options(self) -> WorkloadOptions:
        from prefixwise.bench.run.workload import WorkloadOptions

        return WorkloadOptions(
            self.query_tokens,
            self.num_items,
            self.item_tokens,
            label_token_ids=self.label_token_ids,
            delimiter_token_id=self.delimiter_token_id,
        )

    def arguments(self) -> dict[str, Any]:
        """The options that two runs into one folder must share, as JSON values."""
        options = {name: value for name, value in asdict(self).items() if name not in _TIMEOUTS}
        options["client_chunk_sizes"] = self.sizes
        return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}

    def own_flags(self, backend: BackendName) -> tuple[str, ...]:
        """The caller's additional flags for the servers of this backend."""
        return (*self.server_flags, *(self.jax_server_flags if backend == "jax" else self.pytorch_server_flags))


@dataclass(frozen=True)
class MatrixStep:
    """One of the four matrices."""

    backend: BackendName
    view: EvaluationView

    @property
    def name(self) -> str:
        return f"{self.backend}_{self.view}"

    @property
    def title(self) -> str:
        return f"{self.backend} {self.view.replace('_', '-')} matrix"

    @property
    def file_name(self) -> str:
        return f"{self.name}_matrix.json"

    @property
    def markdown_name(self) -> str:
        return f"{self.name}_matrix.md"


MATRIX_STEPS = (
    MatrixStep("jax", "portable"),
    MatrixStep("jax", "best_native"),
    MatrixStep("pytorch", "portable"),
    MatrixStep("pytorch", "best_native"),
)


def server_flags(plan: ComparePlan, step: MatrixStep, delimiter: int) -> tuple[str, ...]:
    """The flags of `prefixwise serve`; the caller's come last and take precedence."""
    return (
        *(() if plan.model == EMBEDDED else ("--model-path", plan.model)),
        *("--backend", PACKAGES[step.backend], "--dtype", plan.dtype),
        *("--multi-item-scoring-delimiter", str(delimiter)),
        *_view_flags(plan, step),
        "--disable-radix-cache",
        *plan.own_flags(step.backend),
    )


def _view_flags(plan: ComparePlan, step: MatrixStep) -> tuple[str, ...]:
    if step == MatrixStep("pytorch", "best_native"):
        return ()
    chunk_size = plan.num_items if step.view == "portable" else plan.jax_server_chunk_size
    return (
        *("--multi-item-scoring-chunk-size", str(chunk_size), "--multi-item-mask-impl", "auto"),
        *("--multi-item-segment-fallback-threshold", str(_SEGMENT_FALLBACK_THRESHOLD), "--chunked-prefill-size", "-1"),
    )


def matrix_flags(plan: ComparePlan, step: MatrixStep) -> tuple[str, ...]:
    """The flags of `prefixwise bench matrix`, without addresses and files."""
    return (
        *("--backend-name", step.backend, "--evaluation-view", step.view),
        *("--client-chunk-sizes", ",".join(map(str, plan.sizes))),
        *("--warmup-runs", str(plan.warmup_runs), "--timed-runs", str(plan.timed_runs)),
        *("--timed-runs-confirm", str(plan.timed_runs_confirm), "--timeout-sec", str(plan.timeout_sec)),
    )


def matrix_spec(plan: ComparePlan, step: MatrixStep, workload: Workload, folder: str) -> ClientMatrixSpec:
    """The specification for the agent; `folder` is on the target."""
    return ClientMatrixSpec(
        folder=folder,
        name=step.name,
        server_flags=server_flags(plan, step, workload.delimiter_token_id),
        matrix_flags=matrix_flags(plan, step),
        start_timeout_sec=plan.start_timeout_sec,
    )
