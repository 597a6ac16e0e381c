"""What became of a row: a line in its part's object, and later a row of the output or of the error file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RowAnswer:
    """The scores or results of a row, or its error."""

    line: int
    id: object  # None where the row has none
    outcome: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return "error" in self.outcome

    @property
    def num_items(self) -> int:
        return num_scored(self.outcome)

    def to_json(self) -> dict[str, object]:
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.line, **named, **self.outcome}


OnAnswer = Callable[[RowAnswer], None]


def num_scored(row: Mapping[str, Any]) -> int:
    """Items that a row has scores of, or documents."""
    return sum(scores is not None for scores in row.get("scores") or row.get("results") or ())
