"""The score matrix: one workload, cut into chunks of several sizes, each size measured, the best ones once more.

A run is all items of the request, chunk after chunk, one call each. A call that fails ends its run; the run is
recorded, and the sweep goes on. The artifact is saved after every row, so that no measurement is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.files import now_utc, read_artifact, sha256_of
from prefixwise.bench.kinds.base import BackendName, EvaluationView, Scores
from prefixwise.bench.kinds.score_matrix import (
    CONFIRM_RUNS,
    MATRIX_VERSION,
    MatrixRow,
    RunRecord,
    ScoreMatrix,
    WorkloadRef,
    WorkloadShape,
    confirm_sizes,
    make_row,
    num_chunks,
    select_winner,
    summarise,
)
from prefixwise.bench.kinds.workload import Workload, WorkloadRequest, checksum_key, request_checksum
from prefixwise.bench.rules import DEFAULT_BOUNDS, Bounds, Differences, score_differences
from prefixwise.bench.server_facts import (
    DELIMITER,
    contradictions,
    describe_hardware,
    lasting_config,
    served_names,
    server_config,
)
from prefixwise.contract.errors import ArtifactError

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class SweepOptions:
    """What is measured, how often, and what the caller says of the server."""

    backend: BackendName
    view: EvaluationView
    client_chunk_sizes: tuple[int, ...]
    warmup_runs: int = 1
    timed_runs: int = 5
    timed_runs_confirm: int = CONFIRM_RUNS  # 0: there is no confirm phase
    timeout_sec: float = 180.0
    hardware: str | None = None
    usd_per_hour: float | None = None
    declared: Mapping[str, Any] = field(default_factory=dict)  # the server's configuration
    bounds: Bounds = DEFAULT_BOUNDS


class MatrixSweep:
    """Fills the rows of `matrix` that are not there yet; `save` is called after each."""

    def __init__(
        self,
        client: ScoreClient,
        request: WorkloadRequest,
        matrix: ScoreMatrix,
        options: SweepOptions,
        save: Callable[[ScoreMatrix], None],
        model: str = "default",
    ) -> None:
        """`model`: the name that goes with every call."""
        self.client = client
        self.request = request
        self.matrix = matrix
        self.options = options
        self._save = save
        self._model = model

    def missing_sizes(self) -> list[int]:
        """Chunk sizes of the sweep without a row."""
        return _missing(self.options.client_chunk_sizes, self.matrix.results)

    def missing_confirm_sizes(self) -> list[int]:
        """Chunk sizes of the confirm phase without a row; known after the sweep."""
        return _missing(self.matrix.summary.confirm_chunk_sizes, self.matrix.confirm_results)

    def forget_failed(self) -> list[str]:
        """Drop rows with a failed run and return their names. The confirm phase may change."""
        matrix = self.matrix
        failed = [f"chunk size {row.client_chunk_size}" for row in matrix.results if row.status != "ok"]
        failed += [f"chunk size {row.client_chunk_size} again" for row in matrix.confirm_results if row.status != "ok"]
        matrix.results = [row for row in matrix.results if row.status == "ok"]
        matrix.confirm_results = [row for row in matrix.confirm_results if row.status == "ok"]
        return failed

    def sweep(self, on_progress: OnProgress) -> None:
        """Calls `on_progress` at the start of each chunk size."""
        for size in self.missing_sizes():
            on_progress(f"chunk size {size}")
            self.matrix.results.append(self._measure(size, self.options.timed_runs))
            self.matrix.results.sort(key=_place_in(self.options.client_chunk_sizes))
            self.update()

    def confirm(self, on_progress: OnProgress) -> None:
        """Measure the best sizes again, after `sweep`."""
        for size in self.missing_confirm_sizes():
            on_progress(f"chunk size {size} again")
            self.matrix.confirm_results.append(self._measure(size, self.options.timed_runs_confirm))
            self.matrix.confirm_results.sort(key=_place_in(self.matrix.summary.confirm_chunk_sizes))
            self.update()

    def update(self) -> None:
        """Update the summary, and save."""
        matrix = self.matrix
        confirms = self.options.timed_runs_confirm > 0 and not self.missing_sizes()
        if confirms:  # a sweep that was gone on with may have another winner, with other neighbours
            winner = select_winner(matrix.results, self.options.bounds.guardrail_ratio)
            due = confirm_sizes(matrix.results, winner)
            matrix.confirm_results = [row for row in matrix.confirm_results if row.client_chunk_size in due]
        bounds = self.options.bounds
        matrix.summary = summarise(matrix.results, matrix.confirm_results, confirms=confirms, bounds=bounds)
        matrix.complete = not self.missing_sizes() and not self.missing_confirm_sizes()
        matrix.generated_at_utc = now_utc()
        self._save(matrix)

    def _measure(self, size: int, runs: int) -> MatrixRow:
        for index in range(self.options.warmup_runs):
            record, _ = self.run_once(size, index)
            if not record.ok:
                note = f"warm-up run {index} of chunk size {size} failed: {record.failure_reason}"
                self.matrix.notes.append(f"{note}, {record.failure_detail}")
        measured = [self.run_once(size, index) for index in range(runs)]
        records = [record for record, _ in measured]
        good = [scores for record, scores in measured if record.ok]
        num_items = len(self.request.items_token_ids)
        row = make_row(size, num_items, records, good[0] if good else None, self.options.usd_per_hour)
        return self._with_drift(row, _drift(good))

    def _with_drift(self, row: MatrixRow, drift: Differences | None) -> MatrixRow:
        """Add a note where scores differ from run to run: the artifact has those of the first run."""
        if drift is None:
            return row
        if not drift.within(self.options.bounds.max_abs_diff, self.options.bounds.mean_abs_diff):
            self.matrix.notes.append(
                f"the scores of chunk size {row.client_chunk_size} differ from run to run: max abs diff "
                f"{drift.max_abs_diff:.3g} and mean {drift.mean_abs_diff:.3g} from those of the first"
            )
        return row.model_copy(update={"max_abs_diff_between_runs": drift.max_abs_diff})

    def run_once(self, size: int, index: int) -> tuple[RunRecord, Scores]:
        """Run all chunks, up to the first that fails."""
        scores: Scores = []
        latencies: list[float] = []
        items = self.request.items_token_ids
        begin = perf_counter()
        try:
            for start in range(0, len(items), size):
                answer = self.client.score(self._body(items[start : start + size]))
                latencies.append(answer.seconds * 1000)
                scores.extend(answer.scores)
        except CallError as error:
            where = f"chunk {len(latencies) + 1} of {num_chunks(len(items), size)}"
            return _failed_run(index, latencies, error, where), scores
        return _good_run(index, latencies, (perf_counter() - begin) * 1000), scores

    def _body(self, items: list[list[int]]) -> dict[str, Any]:
        return {
            "model": self._model,
            "query": self.request.query_token_ids,
            "items": items,
            "label_token_ids": self.request.label_token_ids,
            "apply_softmax": self.request.apply_softmax,
            "item_first": self.request.item_first,
        }


def _missing(sizes: Sequence[int], rows: Sequence[MatrixRow]) -> list[int]:
    done = {row.client_chunk_size for row in rows}
    return [size for size in sizes if size not in done]


def _place_in(sizes: Sequence[int]) -> Callable[[MatrixRow], int]:
    return lambda row: sizes.index(row.client_chunk_size)


def _drift(runs: Sequence[Scores]) -> Differences | None:
    """Of the run whose scores are farthest from the first one's; None where there is no other."""
    found = [score_differences(scores, runs[0]) for scores in runs[1:]]
    return max(found, key=lambda each: each.max_abs_diff) if found else None


def _good_run(index: int, latencies: list[float], total_ms: float) -> RunRecord:
    return RunRecord(
        run_index=index,
        ok=True,
        total_e2e_ms=total_ms,
        call_latencies_ms=latencies,
        failure_reason=None,
        failure_detail=None,
    )


def _failed_run(index: int, latencies: list[float], error: CallError, where: str) -> RunRecord:
    """Without a total: how long all of it would have taken is not known."""
    return RunRecord(
        run_index=index,
        ok=False,
        total_e2e_ms=None,
        call_latencies_ms=latencies,
        failure_reason=error.reason,
        failure_detail=f"{where}: {error.detail}",
    )


def choose_request(workload: Workload, request_id: str | None) -> WorkloadRequest:
    """The first where no name is given. Raises ArtifactError, also where it is no longer what its checksum says."""
    found = {request.request_id: request for request in workload.requests}
    request = workload.requests[0] if request_id is None else found.get(request_id)
    if request is None:
        raise ArtifactError(f"the workload has no request {request_id!r}, it has {', '.join(found)}")
    recorded = workload.checksums.get(checksum_key(request.request_id))
    if recorded not in (None, request_checksum(request.model_dump())):
        raise ArtifactError(f"{request.request_id} does not fit its checksum {recorded}: the workload was changed")
    return request


def new_matrix(workload_path: Path, workload: Workload, request: WorkloadRequest, options: SweepOptions) -> ScoreMatrix:
    """A matrix without rows; `describe_server` fills in the server."""
    return ScoreMatrix(
        schema_version=MATRIX_VERSION,
        generated_at_utc=now_utc(),
        backend=options.backend,
        evaluation_view=options.view,
        hardware={},
        server_config={},
        workload_ref=WorkloadRef(
            path=str(workload_path),
            sha256=sha256_of(workload_path),
            request_id=request.request_id,
            request_sha256=request_checksum(request.model_dump()),
        ),
        workload=WorkloadShape(
            model=workload.model,
            query_tokens=len(request.query_token_ids),
            num_items=len(request.items_token_ids),
            item_tokens=workload.item_tokens,
            label_token_ids=request.label_token_ids,
        ),
        results=[],
        confirm_results=[],
        summary=summarise([], [], confirms=False, bounds=options.bounds),
        notes=[
            *_notes_on_sizes(options.client_chunk_sizes, len(request.items_token_ids)),
            *_notes_on_delimiter(options.declared.get(DELIMITER), workload.delimiter_token_id),
        ],
        arguments=json.loads(json.dumps(asdict(options))),  # as they are read back
        complete=False,
    )


def describe_server(matrix: ScoreMatrix, options: SweepOptions, client: ScoreClient, info: Mapping[str, Any]) -> str:
    """Fill in what `info` says, and note where the caller says otherwise.

    Returns the name of the model for requests: some servers want none but their own.
    """
    served = served_names(client.get_json("/v1/models"))
    wanted = matrix.workload.model
    matrix.hardware = describe_hardware(info, options.hardware, options.usd_per_hour)
    matrix.server_config = server_config(info, options.declared, client.base_url)
    matrix.notes.extend(contradictions(info, options.declared, options.backend, wanted, served))
    return wanted if wanted in served or not served else served[0]


def rows_in(path: Path) -> str | None:
    """A description of the rows that overwriting the file would lose; None where there are none."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    try:
        old = read_artifact(path, ScoreMatrix)
    except ArtifactError:
        return "something that is no score matrix"
    count = len(old.results) + len(old.confirm_results)
    return f"{count} rows of {old.backend}, measured until {old.generated_at_utc}" if count else None


def resume_matrix(path: Path, fresh: ScoreMatrix) -> ScoreMatrix:
    """`fresh` with the rows of the file, or as it is where there is no file.

    Raises ArtifactError where the file is of another sweep, and says what differs.
    """
    if not path.exists():
        return fresh
    old = read_artifact(path, ScoreMatrix)
    before, now = _identity(old), _identity(fresh)
    differing = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    if differing:
        changes = "; ".join(
            f"{key} was {_short(before.get(key))} and is {_short(now.get(key))}" for key in differing[:5]
        )
        raise ArtifactError(f"{path} is of another sweep and cannot be resumed: {changes}")
    notes = list(dict.fromkeys([*old.notes, *fresh.notes]))
    rows = {"results": old.results, "confirm_results": old.confirm_results}
    return fresh.model_copy(update={**rows, "summary": old.summary, "notes": notes, "complete": old.complete})


# Of arguments that a matrix of prefixwise 0.1 does not have: what it was measured with.
_LATER_ARGUMENTS: Mapping[str, Any] = {"bounds": asdict(DEFAULT_BOUNDS)}


def _identity(matrix: ScoreMatrix) -> dict[str, Any]:
    ref = matrix.workload_ref
    return {
        "workload sha256": ref.request_sha256 or ref.sha256,
        "request": ref.request_id,
        "backend": matrix.backend,
        "evaluation view": matrix.evaluation_view,
        **{f"argument {key}": value for key, value in {**_LATER_ARGUMENTS, **(matrix.arguments or {})}.items()},
        **{f"server's {key}": value for key, value in lasting_config(matrix.server_config).items()},
    }


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _notes_on_delimiter(declared: int | None, of_workload: int) -> list[str]:
    if declared in (None, of_workload):
        return []
    return [f"the server's delimiter is declared as {declared}, and the workload was made for {of_workload}"]


def _notes_on_sizes(sizes: tuple[int, ...], num_items: int) -> list[str]:
    larger = [size for size in sizes if size > num_items]
    if not larger:
        return []
    return [f"chunk sizes {', '.join(map(str, larger))} are more than the {num_items} items: one chunk holds them all"]
