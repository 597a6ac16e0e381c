"""The rows of a part through the engine: several at a time, rows of one query next to each other, answers in row order.

A row that cannot be scored is an answer, too. What is no row's fault ends the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue

from prefixwise.batch.answers import OnAnswer, RowAnswer
from prefixwise.batch.requests import RowDefaults, parse_row, query_key, row_id
from prefixwise.batch.rows import Row
from prefixwise.contract.errors import (
    BatchError,
    InvalidRequestError,
    PrefixwiseError,
    QueueFullError,
    RequestError,
    TokenizerError,
)
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank import RerankRequest, RerankResult
from prefixwise.contract.result import ScoreResult
from prefixwise.engine.engine import PreparedRequest, ScoringEngine
from prefixwise.engine.job import Job
from prefixwise.engine.reranker import Reranker

MAX_ROWS_IN_FLIGHT = 64  # the engine bounds their tokens besides

Request = ScoreRequest | RerankRequest
Result = ScoreResult | RerankResult


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A row that the engine can take."""

    index: int  # in the part
    scoring: PreparedRequest
    finish: Callable[[Job], Result]
    priority: int = 0


@dataclass(frozen=True, eq=False)
class _Started:
    """A row that the engine has taken."""

    row: _Prepared
    job: Job


class RowScorer:
    """An engine that answers rows."""

    def __init__(self, engine: ScoringEngine, defaults: RowDefaults) -> None:
        self._engine = engine
        self._reranker = Reranker(engine)
        self._defaults = defaults

    def score(self, rows: Sequence[Row], on_answer: OnAnswer = lambda answer: None) -> list[RowAnswer]:
        """Answers in the order of the rows. Raises what is no row's fault: BatchError, BackendError."""
        work = _PartWork(self._engine, rows, on_answer)
        requests = {index: request for index, row in enumerate(rows) if (request := self._parse(work, index, row))}
        try:
            for index in sorted(requests, key=lambda each: query_key(requests[each])):
                self._start(work, index, requests[index])
            while work.started:
                work.finish_oldest()
        except BaseException:
            for each in work.started:
                each.job.cancel()
            raise
        return work.in_order()

    def _parse(self, work: _PartWork, index: int, row: Row) -> Request | None:
        """None where it has failed, which is its answer."""
        try:
            if isinstance(row.body, RequestError):
                raise row.body
            work.ids[index] = row_id(row.body, self._defaults.id_field)
            return parse_row(row.body, self._defaults)
        except RequestError as error:
            work.fail(index, error)
            return None

    def _start(self, work: _PartWork, index: int, request: Request) -> None:
        try:
            prepared = self._prepare(index, request)
        except RequestError as error:
            work.fail(index, error)
        except TokenizerError as error:
            work.fail(index, InvalidRequestError(str(error), code="no_tokenizer"))
        else:
            work.start(prepared)

    def _prepare(self, index: int, request: Request) -> _Prepared:
        if isinstance(request, ScoreRequest):
            scoring = self._engine.prepare(request)
            return _Prepared(index, scoring, lambda job: self._engine.finish(scoring, job))
        rerank = self._reranker.prepare(request)
        return _Prepared(index, rerank.scoring, lambda job: self._reranker.finish(rerank, job), request.priority)


class _PartWork:
    """The rows of one part on their way."""

    def __init__(self, engine: ScoringEngine, rows: Sequence[Row], on_answer: OnAnswer) -> None:
        self._engine = engine
        self._rows = rows
        self._on_answer = on_answer
        self._changes: SimpleQueue[None] = SimpleQueue()
        self.ids: dict[int, object] = {}
        self.started: deque[_Started] = deque()
        self._answers: dict[int, RowAnswer] = {}

    def start(self, row: _Prepared) -> None:
        """Once there is room for it."""
        while len(self.started) >= MAX_ROWS_IN_FLIGHT:
            self.finish_oldest()
        while True:
            try:
                job = self._engine.submit(row.scoring, on_change=lambda: self._changes.put(None), priority=row.priority)
            except QueueFullError:  # never where nothing else waits
                self.finish_oldest()
            else:
                self.started.append(_Started(row, job))
                return

    def finish_oldest(self) -> None:
        """Wait for it. Raises BatchError where the engine has failed."""
        oldest = self.started[0]
        while not oldest.job.is_done:
            self._changes.get()
        self.started.popleft()
        row = oldest.row
        try:
            result = row.finish(oldest.job)
        except RequestError as error:
            self.fail(row.index, error)
        except PrefixwiseError:
            raise
        except Exception as error:
            line = self._rows[row.index].line
            raise BatchError(f"the engine failed at the row of line {line}: {type(error).__name__}: {error}") from error
        else:
            warnings = result.warnings if isinstance(result, RerankResult) else ()
            self._answer(row.index, _outcome(result), warnings)

    def fail(self, index: int, error: RequestError) -> None:
        why = {"code": error.code, "message": error.message, "param": error.param}
        self._answer(index, {"error": why})

    def _answer(self, index: int, outcome: Mapping[str, object], warnings: tuple[str, ...] = ()) -> None:
        answer = RowAnswer(self._rows[index].line, self.ids.get(index), outcome, warnings)
        self._answers[index] = answer
        self._on_answer(answer)

    def in_order(self) -> list[RowAnswer]:
        return [self._answers[index] for index in range(len(self._rows))]


def _outcome(result: Result) -> dict[str, object]:
    """Nothing that may differ between runs: no timings, no cached tokens."""
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
