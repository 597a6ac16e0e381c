"""The parts of a job scored in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from prefixwise.batch.answers import OnAnswer
from prefixwise.batch.parts import Part, PartRecord
from prefixwise.batch.score_parts import PartScorer, PartTask
from prefixwise.engine.engine import ScoringEngine


def score_locally(
    parts: Sequence[Part], task: PartTask, engine: ScoringEngine, on_answer: OnAnswer = lambda answer: None
) -> Iterator[PartRecord]:
    """Gives a record after each part. The engine is closed after the last. Raises BatchError, BackendError."""
    with closing(engine), closing(PartScorer(engine, task)) as scorer:
        for part in parts:
            yield scorer.score(part, on_answer)
