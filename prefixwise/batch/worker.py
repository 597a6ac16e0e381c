"""A worker: it reads parts, scores their rows with its engine, and writes the results to the work folder.

Several rows of a part are in flight at once. Rows with the same query follow each other, so that they share its KV
cache, and results keep the order of rows. A row that cannot be scored has an error as its result; any other failure
ends the job.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Protocol

from prefixwise.batch.parts import InputFile, Part, PartRecord, Row, RowReader
from prefixwise.batch.requests import RowDefaults, parse_row, query_key, row_id
from prefixwise.batch.work_folder import OnResult, PartStore, RowResult
from prefixwise.contract.errors import (
    BatchError,
    InvalidRequestError,
    PrefixwiseError,
    QueueFullError,
    RequestError,
    TokenizerError,
    UnavailableError,
    json_values,
)
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult, ScoreResult
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.reranker import Reranker
from prefixwise.launch.loading import OnProgram, load_engine
from prefixwise.launch.options import EngineOptions

MAX_ROWS_IN_FLIGHT = 64  # the engine also bounds their tokens

Request = ScoreRequest | RerankRequest
Result = ScoreResult | RerankResult


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A row that is ready for the engine."""

    index: int  # in the part
    scoring: PreparedRequest
    finish: Callable[[RequestState], Result]
    priority: int = 0


@dataclass(frozen=True, eq=False)
class _Started:
    """A row that the engine scores."""

    row: _Prepared
    state: RequestState


class RowScorer:
    """Scores the rows of one part after another."""

    def __init__(self, engine: ScoringEngine, defaults: RowDefaults) -> None:
        self._engine = engine
        self._reranker = Reranker(engine)
        self._defaults = defaults

    def score(self, rows: Sequence[Row], on_result: OnResult = lambda result: None) -> list[RowResult]:
        """Results in the order of the rows. Raises BatchError or BackendError for a failure that is not a row's."""
        results = PartResults(rows, on_result)
        work = _PartWork(self._engine, results)
        try:
            for index, request in results.parse(self._defaults):
                self._start(work, index, request)
            while work.started:
                work.finish_oldest()
        except BaseException:
            for each in work.started:
                each.state.cancel()
            raise
        return results.in_order()

    def _start(self, work: _PartWork, index: int, request: Request) -> None:
        try:
            prepared = self._prepare(index, request)
        except RequestError as error:
            work.results.fail(index, error)
        except TokenizerError as error:
            work.results.fail(index, InvalidRequestError(str(error), code="no_tokenizer"))
        else:
            work.start(prepared)

    def _prepare(self, index: int, request: Request) -> _Prepared:
        if isinstance(request, ScoreRequest):
            scoring = self._engine.prepare(request)
            return _Prepared(index, scoring, lambda state: self._engine.finish(scoring, state))
        rerank = self._reranker.prepare(request)
        return _Prepared(index, rerank.scoring, lambda state: self._reranker.finish(rerank, state), request.priority)


class PartResults:
    """The rows of one part, and the results of those that are done."""

    def __init__(self, rows: Sequence[Row], on_result: OnResult) -> None:
        self._rows = rows
        self._on_result = on_result
        self._ids: dict[int, object] = {}
        self._results: dict[int, RowResult] = {}

    def parse(self, defaults: RowDefaults) -> list[tuple[int, Request]]:
        """The requests of rows that have one, by index; equal queries follow each other. The other rows have failed."""
        parsed = []
        for index, row in enumerate(self._rows):
            try:
                if isinstance(row.body, RequestError):
                    raise row.body
                self._ids[index] = row_id(row.body, defaults.id_field)
                parsed.append((index, parse_row(row.body, defaults)))
            except RequestError as error:
                self.fail(index, error)
        return sorted(parsed, key=lambda each: query_key(each[1]))

    def fail(self, index: int, error: RequestError) -> None:
        """The row is at fault."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        self._add(index, {"error": fields})

    def finish(self, index: int, result: Result) -> None:
        """The row is scored."""
        self._add(index, _outcome(result), result.warnings)

    def failure(self, index: int, what: str, error: Exception) -> BatchError:
        """The error of a job that cannot go on, at this row."""
        return BatchError(f"{what} failed at the row of line {self._rows[index].line}: {type(error).__name__}: {error}")

    def _add(self, index: int, outcome: Mapping[str, object], warnings: tuple[str, ...] = ()) -> None:
        result = RowResult(self._rows[index].line, self._ids.get(index), outcome, warnings)
        self._results[index] = result
        self._on_result(result)

    def in_order(self) -> list[RowResult]:
        return [self._results[index] for index in range(len(self._rows))]


class _PartWork:
    """The rows of one part that the engine scores."""

    def __init__(self, engine: ScoringEngine, results: PartResults) -> None:
        self._engine = engine
        self._changes: SimpleQueue[None] = SimpleQueue()
        self.results = results
        self.started: deque[_Started] = deque()

    def start(self, row: _Prepared) -> None:
        """Submit the row, once the engine has room for it. Raises BatchError where the engine has failed."""
        while len(self.started) >= MAX_ROWS_IN_FLIGHT:
            self.finish_oldest()
        while True:
            try:
                state = self._engine.submit(
                    row.scoring, on_change=lambda: self._changes.put(None), priority=row.priority
                )
            except QueueFullError:  # cannot be while no row is in flight
                self.finish_oldest()
            except UnavailableError as error:
                raise self.results.failure(row.index, "the engine", error) from error
            else:
                self.started.append(_Started(row, state))
                return

    def finish_oldest(self) -> None:
        """Wait for the oldest row in flight. Raises BatchError where the engine has failed."""
        oldest = self.started[0]
        while not oldest.state.is_done:
            self._changes.get()
        self.started.popleft()
        row = oldest.row
        try:
            result = row.finish(oldest.state)
        except UnavailableError as error:  # of every row from now on
            raise self.results.failure(row.index, "the engine", error) from error
        except RequestError as error:
            self.results.fail(row.index, error)
        except PrefixwiseError:
            raise
        except Exception as error:
            raise self.results.failure(row.index, "the engine", error) from error
        else:
            self.results.finish(row.index, result)


def _outcome(result: Result) -> dict[str, object]:
    """Without timings and cached tokens, which differ between runs."""
    outcome: dict[str, object] = {}
    if isinstance(result, ScoreResult):
        outcome["scores"] = result.scores
        if result.item_errors:
            outcome["item_errors"] = [asdict(each) for each in result.item_errors]
    else:
        outcome["results"] = [
            {"index": each.index, "relevance_score": each.relevance_score, "raw_score": each.raw_score}
            for each in result.results
        ]
    if result.truncated:
        outcome["truncated"] = [asdict(each) for each in result.truncated]
    return outcome


def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
    """The engine of a worker. A row may have any number of items, of as many tokens as a request may have: the
    worker waits while too many are queued."""
    return load_engine(replace(options, max_items_per_request=sys.maxsize), on_program)


@dataclass(frozen=True)
class PartTask:
    """What every worker of a job gets."""

    files: tuple[InputFile, ...]
    defaults: RowDefaults
    parts: PartStore


class ScoresRows(Protocol):
    """Scores the rows of a part: with an engine (`RowScorer`), or by asking a server (`server.py`)."""

    def score(self, rows: Sequence[Row], on_result: OnResult) -> list[RowResult]: ...


class PartScorer:
    """Scores one part after another."""

    def __init__(self, rows: ScoresRows, task: PartTask) -> None:
        self._rows = rows
        self._reader = RowReader(task.files)
        self._parts = task.parts

    @json_values()  # as a server does, which may score the same rows
    def score(self, part: Part, on_result: OnResult = lambda result: None) -> PartRecord:
        """The part is complete when this returns. Raises BatchError, BackendError."""
        results = self._rows.score(self._reader.read(part), on_result)
        self._parts.write(part, results)
        return _record(part, results)

    def close(self) -> None:
        """Close the files, not what scores."""
        self._reader.close()


def _record(part: Part, results: list[RowResult]) -> PartRecord:
    return PartRecord(
        part.index,
        num_rows=len(results),
        num_items=sum(result.num_items for result in results),
        num_failures=sum(result.is_failure for result in results),
        warnings=tuple(sorted({warning for result in results for warning in result.warnings})),
    )


def score_locally(
    parts: Sequence[Part], task: PartTask, engine: ScoringEngine, on_result: OnResult = lambda result: None
) -> Iterator[PartRecord]:
    """Score the parts in this process and yield a record after each; then close the engine. Raises BatchError,
    BackendError."""
    with closing(engine):
        yield from score_parts(parts, task, RowScorer(engine, task.defaults), on_result)


def score_parts(parts: Sequence[Part], task: PartTask, rows: ScoresRows, on_result: OnResult) -> Iterator[PartRecord]:
    """Score the parts one after the other and yield a record after each."""
    with closing(PartScorer(rows, task)) as scorer:
        for part in parts:
            yield scorer.score(part, on_result)
