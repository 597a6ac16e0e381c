"""A worker: parts in, their objects in the work folder out. The same on one machine and on each of many."""

from __future__ import annotations

from dataclasses import dataclass

from prefixwise.batch.answers import OnAnswer, RowAnswer
from prefixwise.batch.part_store import PartStore
from prefixwise.batch.parts import InputFile, Part, PartRecord
from prefixwise.batch.requests import RowDefaults
from prefixwise.batch.rows import RowReader
from prefixwise.batch.score_rows import RowScorer
from prefixwise.engine.engine import ScoringEngine


@dataclass(frozen=True)
class PartTask:
    """What every worker of a job is told."""

    files: tuple[InputFile, ...]
    defaults: RowDefaults
    parts: PartStore


class PartScorer:
    """Scores one part after the other with its engine."""

    def __init__(self, engine: ScoringEngine, task: PartTask) -> None:
        self._rows = RowScorer(engine, task.defaults)
        self._reader = RowReader(task.files)
        self._parts = task.parts

    def score(self, part: Part, on_answer: OnAnswer = lambda answer: None) -> PartRecord:
        """The part is complete when this returns. Raises BatchError, BackendError."""
        answers = self._rows.score(self._reader.read(part), on_answer)
        self._parts.write(part, answers)
        return _record(part, answers)

    def close(self) -> None:
        """The files; the engine is its owner's."""
        self._reader.close()


def _record(part: Part, answers: list[RowAnswer]) -> PartRecord:
    return PartRecord(
        part.index,
        num_rows=len(answers),
        num_items=sum(answer.num_items for answer in answers),
        num_failures=sum(answer.is_failure for answer in answers),
        warnings=tuple(sorted({warning for answer in answers for warning in answer.warnings})),
    )
