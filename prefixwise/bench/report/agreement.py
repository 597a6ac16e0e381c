"""Do the scores of the two backends agree? Yes, no, or nobody compared them: three answers, never two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from prefixwise.bench.artifacts import Comparison, Correctness
from prefixwise.bench.report.document import Card, Cell, judged
from prefixwise.bench.report.numbers import difference

Agreement = Literal["agree", "differ", "not compared"]
_MISSING = "missing"  # the status where one of the two has no scores


def agreement(comparison: Comparison) -> Agreement:
    """Of both views. One difference that is too large is enough; a view without any pair of scores leaves it open."""
    states = {_state(each) for each in _views(comparison).values()}
    if "differ" in states:
        return "differ"
    if "not compared" in states:
        return "not compared"
    return "differ" if comparison.correctness.get("pass") is False else "agree"  # never greener than the file


def correctness_state(found: Correctness) -> Agreement:
    """Of one row."""
    if found.status == _MISSING:
        return "not compared"
    return "agree" if found.passed else "differ"


def _views(comparison: Comparison) -> dict[str, Sequence[Correctness]]:
    return {
        "the same client": [row.correctness for row in comparison.portable_view.rows],
        "each at its best": [comparison.best_native_view.correctness],
    }


def _state(rows: Sequence[Correctness]) -> Agreement:
    """A row that only one backend has is no disagreement."""
    states = {correctness_state(each) for each in rows} - {"not compared"}
    if not states:
        return "not compared"
    return "differ" if "differ" in states else "agree"


def thresholds(comparison: Comparison) -> tuple[float | None, float | None]:
    """Of the largest difference, and of the mean one; None where the comparison names no number."""
    found = comparison.correctness.get("thresholds")
    bounds = found if isinstance(found, dict) else {}
    return _number(bounds.get("max_abs_diff")), _number(bounds.get("mean_abs_diff"))


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def agreement_sentence(comparison: Comparison) -> str:
    """For the verdict."""
    state, largest = agreement(comparison), largest_difference(comparison)
    bound, _ = thresholds(comparison)
    limit = "no bound given" if bound is None else f"bound {bound:g}"
    if state == "differ":
        why = _first_fault(comparison) if largest is None else f"they differ by at most {difference(largest)} ({limit})"
        return f"The scores do NOT agree everywhere: {why}."
    if state == "agree":
        return f"The scores agree: they differ by at most {difference(largest)} ({limit})."
    if largest is None:
        return "Whether the scores agree is not known: none could be compared."
    lacking = " and ".join(name for name, rows in _views(comparison).items() if _state(rows) == "not compared")
    where = f"they differ by at most {difference(largest)} ({limit}) where both have some"
    return f"Whether the scores agree is not known everywhere: {where}, but nothing was compared for {lacking}."


def _first_fault(comparison: Comparison) -> str:
    rows = [each for found in _views(comparison).values() for each in found]
    return next((each.detail or each.status for each in rows if correctness_state(each) == "differ"), "")


def largest_difference(comparison: Comparison) -> float | None:
    """None where nothing was compared."""
    rows = [each for found in _views(comparison).values() for each in found]
    return max((each.max_abs_diff for each in rows if each.max_abs_diff is not None), default=None)


def agreement_card(comparison: Comparison) -> Card:
    """Red only where scores were compared and differ."""
    state, largest = agreement(comparison), largest_difference(comparison)
    detail = "nothing was compared" if largest is None else f"at most {difference(largest)} apart"
    if state == "agree":
        return Card("Scores", "agree", detail, "good")
    if state == "differ":
        return Card("Scores", "DIFFER", detail if largest is not None else _first_fault(comparison), "bad")
    return Card("Scores", "not compared", detail if largest is None else f"{detail} where both have some", "open")


def judged_scores(found: Correctness) -> Cell:
    """Scores that are missing were not judged."""
    state = correctness_state(found)
    if state == "not compared":
        return Cell(state, "open")
    return judged(found.passed) if found.status == "compared" else Cell(found.status.replace("_", " "), "bad")
