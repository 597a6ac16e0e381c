"""The comparison of two backends, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from prefixwise.bench.kinds.base import BACKENDS, Artifact, BackendName

COMPARISON_VERSION: Literal["cross_backend_comparison_v1"] = "cross_backend_comparison_v1"


Count = Annotated[int, Field(ge=0)]


ChunkSize = Annotated[int, Field(ge=1)]


NumberOrNone = Annotated[float, Field(ge=0)] | None


COMPARED, MISSING, SHAPE_MISMATCH = "ok", "missing_scores", "shape_mismatch"
_OLD_STATUS = {"compared": COMPARED, "missing": MISSING}  # of prefixwise 0.1


class Correctness(Artifact):
    """Scores of one backend against the other's, which are the reference."""

    status: Annotated[str, AfterValidator(lambda found: _OLD_STATUS.get(found, found))]
    max_abs_diff: float | None
    mean_abs_diff: float | None
    num_compared: int
    passed: bool = Field(alias="pass")
    detail: str | None

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)


@with_config(ConfigDict(extra="allow", strict=True, allow_inf_nan=False))
class QuotedRow(TypedDict, total=False):
    """A row of a matrix as it is cited: a mapping of which nothing need be there, but what is there can be drawn.

    Other tools cite fewer metrics, or more.
    """

    client_chunk_size: ChunkSize
    num_chunks: Count
    timed_runs: Count
    successful_runs: Count
    success_rate: NumberOrNone
    status: str
    p50_total_e2e_ms: NumberOrNone
    p95_total_e2e_ms: NumberOrNone
    mean_total_e2e_ms: NumberOrNone
    mean_chunk_call_ms: NumberOrNone
    p95_chunk_call_ms: NumberOrNone
    throughput_items_sec: NumberOrNone
    first_run_penalty_ratio: NumberOrNone
    failure_reason_counts: dict[str, Count]
    usd_per_run: NumberOrNone
    items_per_usd: NumberOrNone


class PortableRow(Artifact):
    """One chunk size, side by side; None where a backend has no such row."""

    client_chunk_size: ChunkSize
    jax: QuotedRow | None
    pytorch: QuotedRow | None
    correctness: Correctness
    deltas: dict[str, Any] | None = None  # JAX's metrics against PyTorch's, None where one has none

    def side(self, backend: BackendName) -> QuotedRow | None:
        return self.jax if backend == "jax" else self.pytorch


class WinningRow(Artifact):
    """A row that wins, with the metrics that decide."""

    backend: BackendName
    client_chunk_size: ChunkSize
    throughput_items_sec: NumberOrNone = None
    p95_total_e2e_ms: NumberOrNone = None


class Winner(Artifact):
    """The row that wins among some; `winner` is None where none is eligible."""

    eligible_count: Count | None = None
    guardrail_ratio: float | None = None
    guardrail_p95_ms: NumberOrNone = None  # the highest p95 that may win
    winner: WinningRow | None
    # Of ours, between the two backends.
    tie: bool = False  # PyTorch's row is as good as JAX's, which `winner` names
    ratio: float | None = None  # the winner's throughput over the other's best, None without another
    deltas: dict[str, Any] | None = None  # JAX's metrics against PyTorch's

    @property
    def backend(self) -> BackendName | Literal["tie"] | None:
        if self.tie:
            return "tie"
        return None if self.winner is None else self.winner.backend

    @property
    def place(self) -> tuple[BackendName, int] | None:
        """Backend and chunk size of the row."""
        return None if self.winner is None else (self.winner.backend, self.winner.client_chunk_size)


class FlatWinner(Artifact):
    """The winner as prefixwise 0.1 wrote it."""

    backend: BackendName | Literal["tie"] | None
    client_chunk_size: ChunkSize | None = None
    ratio: float | None = None
    deltas: dict[str, Any] | None = None


def _nested(found: object) -> object:
    """From a `FlatWinner`."""
    if not isinstance(found, Mapping) or "winner" in found or "backend" not in found:
        return found
    backend, is_tie = found["backend"], found["backend"] == "tie"
    row = {"backend": "jax" if is_tie else backend, "client_chunk_size": found.get("client_chunk_size")}
    rest = {name: value for name, value in found.items() if name not in row}
    return {**rest, "winner": None if backend is None else row, "tie": is_tie}


def _nested_best(found: object) -> object:
    """From the quoted rows of prefixwise 0.1, or None."""
    return {name: _best_of(name, row) for name, row in found.items()} if isinstance(found, Mapping) else found


def _best_of(backend: str, row: object) -> object:
    if row is None:
        return {"winner": None}
    if not isinstance(row, Mapping) or "winner" in row or "client_chunk_size" not in row:
        return row
    metrics = ("client_chunk_size", "throughput_items_sec", "p95_total_e2e_ms")
    return {"winner": {"backend": backend, **{name: row[name] for name in metrics if name in row}}}


AnyWinner = Annotated[Winner, BeforeValidator(_nested, json_schema_input_type=Winner | FlatWinner)]
AnyBest = Annotated[
    dict[str, Winner], BeforeValidator(_nested_best, json_schema_input_type=dict[str, Winner | QuotedRow | None])
]


class PortableView(Artifact):
    """The same client, the same chunks."""

    guardrail_ratio: float = Field(ge=1)
    rows: list[PortableRow]
    backend_best: AnyBest
    winner: AnyWinner

    def best(self, backend: BackendName) -> QuotedRow | None:
        """The best row of a backend, with all metrics that are quoted."""
        found = self.backend_best.get(backend)
        return None if found is None else self._row(found.winner)

    def contest(self) -> dict[BackendName, QuotedRow | None]:
        """The rows to compare: the winner, and the best row of the other backend."""
        row = self.winner.winner
        return {each: self._row(row) if row and row.backend == each else self.best(each) for each in BACKENDS}

    def _row(self, chosen: WinningRow | None) -> QuotedRow | None:
        if chosen is None:
            return None
        row = next((row for row in self.rows if row.client_chunk_size == chosen.client_chunk_size), None)
        quoted = None if row is None else row.side(chosen.backend)
        size: QuotedRow = {"client_chunk_size": chosen.client_chunk_size}
        metrics: QuotedRow = {
            "throughput_items_sec": chosen.throughput_items_sec,
            "p95_total_e2e_ms": chosen.p95_total_e2e_ms,
        }
        return {**(metrics if quoted is None else quoted), **size}


class BestNativeView(Artifact):
    """Each backend with its own settings."""

    guardrail_ratio: float | None = Field(default=None, ge=1)
    jax_selected: QuotedRow | None
    pytorch_selected: QuotedRow | None
    correctness: Correctness
    winner: AnyWinner
    deltas: dict[str, Any] | None = None  # as in a portable row


@dataclass(frozen=True)
class InputFile:
    """A compared matrix; `sha256` is None where the comparison does not have it."""

    path: str
    sha256: str | None


class Comparison(Artifact):
    """`comparison.json`."""

    schema_version: Literal["cross_backend_comparison_v1"]
    generated_at_utc: str | None = None
    portable_view: PortableView
    best_native_view: BestNativeView
    correctness: dict[str, Any]
    recommendations: dict[str, Any]
    notes: list[str]
    inputs: dict[str, Any]  # `jax_portable_json` and so on: paths
    inputs_sha256: dict[str, str] = Field(default_factory=dict)  # of the same names

    def input_files(self) -> dict[str, InputFile]:
        """The compared matrices by backend and view, like `jax_portable`, as far as the file names them."""
        return {name.removesuffix("_json"): found for name in self.inputs if (found := self._input(name)) is not None}

    def _input(self, name: str) -> InputFile | None:
        entry = self.inputs[name]
        if isinstance(entry, str):
            return InputFile(entry, self.inputs_sha256.get(name))
        # prefixwise 0.1 wrote path and checksum together.
        path, sha256 = (entry.get(key) for key in ("path", "sha256")) if isinstance(entry, Mapping) else (None, None)
        return InputFile(path, sha256 if isinstance(sha256, str) else None) if isinstance(path, str) else None
