"""`Findings`: what is wrong or odd with one file, each with the field, what was expected, and what is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prefixwise.bench.checks.reading import is_number
from prefixwise.contract.describe import describe

TOLERANCE = 1e-6  # relative, of figures that are computed again


@dataclass(frozen=True)
class Finding:
    """One of them."""

    field: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.got}"


@dataclass
class Findings:
    """Of one file; `document` is its JSON as it stands there."""

    path: Path
    document: Mapping[str, Any]
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def fail(self, where: str, expected: str, got: object) -> None:
        """What makes the file invalid."""
        self.errors.append(Finding(where, expected, str(got)))

    def warn(self, where: str, expected: str, got: object) -> None:
        """What is legal, and may still not be what was meant."""
        self.warnings.append(Finding(where, expected, str(got)))

    def same(self, where: str, expected: object, got: object, why: str = "") -> None:
        """`why` says where the expected value comes from."""
        if got != expected:
            self.fail(where, f"{expected}{_because(why)}", got)

    def close(self, where: str, expected: float | None, got: object, why: str = "") -> None:
        """The same figure, but for the last digits of a computation in another order."""
        if expected is None or not is_number(got):
            self.same(where, expected, got, why)
        elif not is_close(expected, got):
            self.fail(where, f"{expected:.10g}{_because(why)}", f"{got:.10g}")

    def warn_of_few_labels(self, where: str, labels: Sequence[int]) -> None:
        """Scores are a softmax over the labels, and over one label it is 1.0 whatever the model says."""
        if len(set(labels)) < 2:
            self.warn(where, "at least two different ids, as every score of one label is 1.0", list(labels))

    def add_schema_errors(self, error: ValidationError) -> None:
        """All of them, as pydantic found them."""
        for each in error.errors():
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in each["loc"]).lstrip(".")
            if each["type"] == "missing":
                self.fail(where, "the field", "nothing")
            else:
                self.fail(where or "the file", _expectation(each["msg"]), describe(each["input"]))


def is_close(expected: float | None, got: object) -> bool:
    """Equal but for the last digits; None is only equal to None."""
    if expected is None or not is_number(got):
        return expected is None and got is None
    return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=1e-12)


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _expectation(message: str) -> str:
    """`Input should be a valid integer` to `a valid integer`."""
    return message.removeprefix("Input should be ")
