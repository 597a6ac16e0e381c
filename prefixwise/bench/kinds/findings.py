"""`Findings`: the errors and warnings of one file, each with the field, the expected value and the actual one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from pydantic import ValidationError

from prefixwise.contract.errors import describe


def parse_json(content: bytes) -> Any:
    """Raises ValueError, also for NaN and Infinity, which Python reads and JSON does not have."""
    try:
        return json.loads(content, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("lists or objects in each other, too deep to be read") from None


def find_file(path: str, beside: Path) -> Path | None:
    """Where the artifact says, or under the same name beside the artifact."""
    return next(iter(find_files(path, beside)), None)


def find_files(path: str, beside: Path) -> list[Path]:
    """All that it could be: a folder of artifacts that was copied still names the place it came from."""
    places = dict.fromkeys((Path(path), beside.parent / Path(path).name))
    return [place for place in places if is_file(place)]


def is_file(path: Path) -> bool:
    """False also for an invalid file name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_number(value: object) -> TypeGuard[int | float]:
    """True for finite numbers that fit into a float; False for booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word}, which is no number of JSON")


TOLERANCE = 1e-6  # relative, of metrics that are computed again


@dataclass(frozen=True)
class Finding:
    """One error or warning."""

    field: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.got}"


@dataclass
class Findings:
    """The findings of one file; `document`: its JSON."""

    path: Path
    document: Mapping[str, Any]
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    def fail(self, where: str, expected: str, got: object) -> None:
        """Add an error: the file is invalid."""
        self.errors.append(Finding(where, expected, str(got)))

    def warn(self, where: str, expected: str, got: object) -> None:
        """Add a warning: legal, but possibly a mistake."""
        self.warnings.append(Finding(where, expected, str(got)))

    def same(self, where: str, expected: object, got: object, why: str = "") -> None:
        """Add an error unless the values are equal. `why`: the source of the expected value."""
        if got != expected:
            self.fail(where, f"{expected}{_because(why)}", got)

    def close(self, where: str, expected: float | None, got: object, why: str = "") -> None:
        """Add an error unless the values are equal up to rounding."""
        if expected is None or not is_number(got):
            self.same(where, expected, got, why)
        elif not is_close(expected, got):
            self.fail(where, f"{expected:.10g}{_because(why)}", f"{got:.10g}")

    def warn_of_few_labels(self, where: str, labels: Sequence[int]) -> None:
        """Scores are a softmax over the labels, and over one label it is 1.0 whatever the model says."""
        if len(set(labels)) < 2:
            self.warn(where, "at least two different ids, as every score of one label is 1.0", list(labels))

    def add_schema_errors(self, error: ValidationError) -> None:
        """Add all errors of a pydantic validation."""
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
