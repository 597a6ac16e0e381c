"""The score matrix: one workload, cut into chunks of several sizes, each size measured, the best ones once more.

A run is all items of the request, chunk after chunk, one call each. A call that fails ends its run; the run is
recorded, and the sweep goes on. The artifact is saved after every row, so that what was measured is never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from prefixwise.bench.artifacts import (
    BackendName,
    EvaluationView,
    MatrixRow,
    RunRecord,
    ScoreMatrix,
    Scores,
    WorkloadRequest,
)
from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.files import now_utc
from prefixwise.bench.matrix.rows import make_row, num_chunks, summarise
from prefixwise.bench.rules import CONFIRM_RUNS, Differences, confirm_sizes, score_differences, select_winner

Tell = Callable[[str], None]


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
        """Of the sweep."""
        return _missing(self.options.client_chunk_sizes, self.matrix.results)

    def missing_confirm_sizes(self) -> list[int]:
        """Of the confirm phase, which is known when the sweep is done."""
        return _missing(self.matrix.summary.confirm_chunk_sizes, self.matrix.confirm_results)

    def forget_failed(self) -> list[str]:
        """Rows with a run that failed become missing ones; which they are, in words. The confirm phase may change."""
        matrix = self.matrix
        told = [f"chunk size {row.client_chunk_size}" for row in matrix.results if row.status != "ok"]
        told += [f"chunk size {row.client_chunk_size} again" for row in matrix.confirm_results if row.status != "ok"]
        matrix.results = [row for row in matrix.results if row.status == "ok"]
        matrix.confirm_results = [row for row in matrix.confirm_results if row.status == "ok"]
        return told

    def sweep(self, tell: Tell) -> None:
        """`tell` hears of each chunk size as it begins."""
        for size in self.missing_sizes():
            tell(f"chunk size {size}")
            self.matrix.results.append(self._measure(size, self.options.timed_runs))
            self.matrix.results.sort(key=_place_in(self.options.client_chunk_sizes))
            self.update()

    def confirm(self, tell: Tell) -> None:
        """After `sweep`."""
        for size in self.missing_confirm_sizes():
            tell(f"chunk size {size} again")
            self.matrix.confirm_results.append(self._measure(size, self.options.timed_runs_confirm))
            self.matrix.confirm_results.sort(key=_place_in(self.matrix.summary.confirm_chunk_sizes))
            self.update()

    def update(self) -> None:
        """The summary of what is there, and the file."""
        matrix = self.matrix
        confirms = self.options.timed_runs_confirm > 0 and not self.missing_sizes()
        if confirms:  # a sweep that was gone on with may have another winner, with other neighbours
            due = confirm_sizes(matrix.results, select_winner(matrix.results))
            matrix.confirm_results = [row for row in matrix.confirm_results if row.client_chunk_size in due]
        matrix.summary = summarise(matrix.results, matrix.confirm_results, confirms=confirms)
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
        """One run's scores stand for all, which is worth a note where the others' are not the same."""
        if drift is None:
            return row
        if not drift.within():
            self.matrix.notes.append(
                f"the scores of chunk size {row.client_chunk_size} differ from run to run: max abs diff "
                f"{drift.max_abs_diff:.3g} and mean {drift.mean_abs_diff:.3g} from those of the first"
            )
        return row.model_copy(update={"max_abs_diff_between_runs": drift.max_abs_diff})

    def run_once(self, size: int, index: int) -> tuple[RunRecord, Scores]:
        """All chunks, or those before the one that failed."""
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
