"""The verdict of a comparison: who is faster, and do the scores agree?

Each view is measured twice, in the sweep and in the confirm phase: both are quoted, and where they name different
winners, neither is one. Scores agree, differ, or were not compared: three answers, never two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixwise.bench.kinds.base import BACKEND_NAMES, BACKENDS, BackendName, EvaluationView
from prefixwise.bench.kinds.comparison.inputs import ReportInputs
from prefixwise.bench.kinds.comparison.model import COMPARED, MISSING, Comparison, Correctness, Winner
from prefixwise.bench.kinds.findings import is_number
from prefixwise.bench.kinds.score_matrix import THROUGHPUT
from prefixwise.bench.render.document import NONE, Card, Cell, judged
from prefixwise.bench.render.numbers import change_percent, difference, percent, short_number

Agreement = Literal["agree", "differ", "not compared"]


def agreement(comparison: Comparison) -> Agreement:
    """Over both views: one large difference means "differ"; a view without scores means "not compared"."""
    states = {_state(each) for each in _views(comparison).values()}
    if "differ" in states:
        return "differ"
    if "not compared" in states:
        return "not compared"
    return "differ" if comparison.correctness.get("pass") is False else "agree"  # never greener than the file


def correctness_state(found: Correctness) -> Agreement:
    """The agreement of one row."""
    if found.status == MISSING:
        return "not compared"
    return "agree" if found.passed else "differ"


def _views(comparison: Comparison) -> dict[str, Sequence[Correctness]]:
    return {
        "the same client": [row.correctness for row in comparison.portable_view.rows],
        "each at its best": [comparison.best_native_view.correctness],
    }


def _state(rows: Sequence[Correctness]) -> Agreement:
    """The agreement of one view; rows of one backend alone are ignored."""
    states = {correctness_state(each) for each in rows} - {"not compared"}
    if not states:
        return "not compared"
    return "differ" if "differ" in states else "agree"


def thresholds(comparison: Comparison) -> tuple[float | None, float | None]:
    """The bounds of the largest and the mean difference; None where the comparison has none."""
    found = comparison.correctness.get("thresholds")
    bounds = found if isinstance(found, dict) else {}
    largest, mean = bounds.get("max_abs_diff"), bounds.get("mean_abs_diff")
    return (largest if is_number(largest) else None, mean if is_number(mean) else None)


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
    """The judgement of a row; open where scores are missing."""
    state = correctness_state(found)
    if state == "not compared":
        return Cell(state, "open")
    return judged(found.passed) if found.status == COMPARED else Cell(found.status.replace("_", " "), "bad")


_OTHER: Mapping[BackendName, BackendName] = {"jax": "pytorch", "pytorch": "jax"}


_FIRST, _AGAIN = "sweep", "confirm phase"


_OTHER_PHASE = {_FIRST: _AGAIN, _AGAIN: _FIRST}


@dataclass(frozen=True)
class SecondLook:
    """Both backends at the same chunk sizes, measured in the other phase: items per second."""

    quoted_phase: str  # the one that the comparison quotes
    phase: str
    throughput: Mapping[BackendName, float]

    def lead(self, backend: BackendName) -> float:
        """The lead over the other backend, in percent."""
        return change_percent(self.throughput[backend], self.throughput[_OTHER[backend]]) or 0.0

    def phrase(self, first: BackendName) -> str:
        pair = (f"{BACKEND_NAMES[each]} {short_number(self.throughput[each])}" for each in (first, _OTHER[first]))
        return f"{self.phase}: {', '.join(pair)} items/s"


@dataclass(frozen=True)
class Race:
    """One view: who wins by the comparison, with which rows, and what the other phase says."""

    how: str
    winner: Winner
    rows: Mapping[BackendName, Mapping[str, Any] | None]
    second: SecondLook | None

    def row(self, backend: BackendName) -> Mapping[str, Any]:
        return self.rows.get(backend) or {}

    def lead(self, backend: BackendName) -> float | None:
        """The lead over the other backend, in percent; None where one has no row."""
        return change_percent(self.row(backend).get(THROUGHPUT), self.row(_OTHER[backend]).get(THROUGHPUT))

    def winning(self) -> BackendName | None:
        return None if self.winner.tie or self.winner.winner is None else self.winner.winner.backend

    def is_reversed(self) -> bool:
        """Is the faster backend slower in the other phase?"""
        best = self.winning()
        if best is None or self.second is None or (self.lead(best) or 0.0) <= 0:
            return False
        return self.second.lead(best) <= 0


def races(inputs: ReportInputs) -> tuple[Race, Race]:
    """The portable view, which quotes the sweep, and the best-native one, which quotes the confirm phase if it can."""
    portable, native = inputs.comparison.portable_view, inputs.comparison.best_native_view
    selected: dict[BackendName, Any] = {"jax": native.jax_selected, "pytorch": native.pytorch_selected}
    return (
        Race("With the same client", portable.winner, portable.contest(), _second(inputs, "portable")),
        Race("Each at its best", native.winner, selected, _second(inputs, "best_native")),
    )


def _second(inputs: ReportInputs, view: EvaluationView) -> SecondLook | None:
    """None where a backend was measured once, or the two are quoted from different phases."""
    phases = {_AGAIN if view == "best_native" and inputs.is_confirmed(each) else _FIRST for each in BACKENDS}
    if len(phases) > 1:
        return None
    quoted = phases.pop()
    found = {each: _throughput(inputs, each, view, _OTHER_PHASE[quoted]) for each in BACKENDS}
    known = {each: value for each, value in found.items() if value is not None}
    return SecondLook(quoted, _OTHER_PHASE[quoted], known) if len(known) == len(BACKENDS) else None


def _throughput(inputs: ReportInputs, backend: BackendName, view: EvaluationView, phase: str) -> float | None:
    """The throughput at the quoted chunk size, in the other phase."""
    file, native = inputs.matrix(backend, view), inputs.comparison.best_native_view
    selected = native.jax_selected if backend == "jax" else native.pytorch_selected
    row = inputs.comparison.portable_view.contest()[backend] if view == "portable" else selected
    if file is None or row is None:
        return None
    rows = file.matrix.confirm_results if phase == _AGAIN else file.matrix.results
    size = row.get("client_chunk_size")
    return next((each.throughput_items_sec for each in rows if each.client_chunk_size == size), None)


def race_sentence(race: Race) -> str:
    """For the verdict."""
    best = race.winning()
    if race.winner.tie:
        return f"{race.how}, the two are equal: {_best(race.row('jax'))}."
    if best is None:
        return f"{race.how}, neither can be recommended: no chunk size counts."
    other, lead, name = _OTHER[best], race.lead(best), BACKEND_NAMES[best]
    if lead is None:
        return f"{race.how}, {name} is the only one that counts: {_best(race.row(best))}."
    what = f"{_best(race.row(best))}; {BACKEND_NAMES[other]} does {_best(race.row(other))}"
    if race.second is not None and race.is_reversed():
        return _reversed(race.how, race.second, best, lead, what)
    quoted = f" ({race.second.phrase(best)})" if race.second is not None else ""
    if lead <= 0:
        return f"{race.how}, {name} wins although it is {_not_faster(race, best, lead)}: {what}{quoted}."
    return f"{race.how}, {name} is {lead:.1f}% faster: {what}{quoted}."


def _not_faster(race: Race, best: BackendName, lead: float) -> str:
    """The rule has two reasons to choose one that is not faster: a smaller chunk, and the guardrail."""
    sizes = [race.row(each).get("client_chunk_size") or 0 for each in (best, _OTHER[best])]
    if lead == 0 and sizes[0] < sizes[1]:
        return "only as fast, because its chunks are smaller"
    how = "only as fast" if lead == 0 else f"{-lead:.1f}% slower"
    return f"{how}, because the other's p95 is beyond the guardrail"


def _reversed(how: str, second: SecondLook, best: BackendName, lead: float, what: str) -> str:
    other = _OTHER[best]
    behind = second.lead(other)
    pair = f"{short_number(second.throughput[other])} against {short_number(second.throughput[best])} items/s"
    contrary = f"{BACKEND_NAMES[other]} {behind:.1f}% faster" if behind > 0 else "the two equal"
    return (
        f"{how}, there is no sure winner: the {second.quoted_phase} has {BACKEND_NAMES[best]} {lead:.1f}% faster "
        f"({what}), but the {second.phase} has {contrary} ({pair})."
    )


def _best(row: Mapping[str, Any]) -> str:
    return f"{short_number(row.get(THROUGHPUT))} items/s in chunks of {row.get('client_chunk_size', NONE)}"


def race_card(name: str, race: Race) -> Card:
    """What the sentence says, in two lines."""
    best, second = race.winning(), race.second
    pair = ", ".join(f"{BACKEND_NAMES[each]} {short_number(race.row(each).get(THROUGHPUT))}" for each in BACKENDS)
    detail = f"{pair} items/s" if second is None else f"{second.quoted_phase}: {pair}\n{second.phrase('jax')}"
    if best is None:
        return Card(name, "tie" if race.winner.tie else "neither", detail)
    if race.is_reversed():
        return Card(name, "no sure winner", detail, "open")
    lead = race.lead(best)
    return Card(name, f"{BACKEND_NAMES[best]}{'' if lead is None else f' {percent(lead)}'}", detail)
