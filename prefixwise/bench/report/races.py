"""Who is faster? Each view is measured twice, in the sweep and in the confirm phase: both are quoted, and where they
name different winners, neither is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixwise.bench.artifacts import BackendName, EvaluationView
from prefixwise.bench.report.document import NONE, Card
from prefixwise.bench.report.inputs import BACKEND_NAMES, BACKENDS, ReportInputs
from prefixwise.bench.report.numbers import change_percent, figure, percent

THROUGHPUT = "throughput_items_sec"
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
        """Over the other one, in percent."""
        return change_percent(self.throughput[backend], self.throughput[_OTHER[backend]]) or 0.0

    def in_words(self, first: BackendName) -> str:
        pair = (f"{BACKEND_NAMES[each]} {figure(self.throughput[each])}" for each in (first, _OTHER[first]))
        return f"{self.phase}: {', '.join(pair)} items/s"


@dataclass(frozen=True)
class Race:
    """One view: who wins by the comparison, with which rows, and what the other phase says."""

    how: str
    winner: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any] | None]
    second: SecondLook | None

    def row(self, backend: BackendName) -> Mapping[str, Any]:
        return self.rows.get(backend) or {}

    def lead(self, backend: BackendName) -> float | None:
        """Over the other one, in percent, where both have a row."""
        return change_percent(self.row(backend).get(THROUGHPUT), self.row(_OTHER[backend]).get(THROUGHPUT))

    def winning(self) -> BackendName | None:
        return next((each for each in BACKENDS if each == self.winner.get("backend")), None)

    def is_reversed(self) -> bool:
        """Is the winner, which is the faster one, not so in the other phase?"""
        best = self.winning()
        if best is None or self.second is None or (self.lead(best) or 0.0) <= 0:
            return False
        return self.second.lead(best) <= 0


def races(inputs: ReportInputs) -> tuple[Race, Race]:
    """The portable view, which quotes the sweep, and the best-native one, which quotes the confirm phase if it can."""
    portable, native = inputs.comparison.portable_view, inputs.comparison.best_native_view
    selected = {"jax": native.jax_selected, "pytorch": native.pytorch_selected}
    return (
        Race("With the same client", portable.winner, portable.backend_best, _second(inputs, "portable")),
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
    """Of the chunk size that the comparison quotes."""
    file, native = inputs.matrix(backend, view), inputs.comparison.best_native_view
    selected = native.jax_selected if backend == "jax" else native.pytorch_selected
    row = inputs.comparison.portable_view.backend_best.get(backend) if view == "portable" else selected
    if file is None or row is None:
        return None
    rows = file.matrix.confirm_results if phase == _AGAIN else file.matrix.results
    size = row.get("client_chunk_size")
    return next((each.throughput_items_sec for each in rows if each.client_chunk_size == size), None)


def race_sentence(race: Race) -> str:
    """For the verdict."""
    best = race.winning()
    if "backend" not in race.winner:
        return f"{race.how}, the comparison names no winner."
    if best is None and race.winner["backend"] == "tie":
        return f"{race.how}, the two are equal: {_best(race.row('jax'))}."
    if best is None:
        return f"{race.how}, neither can be recommended: no chunk size counts."
    other, lead, name = _OTHER[best], race.lead(best), BACKEND_NAMES[best]
    if lead is None:
        return f"{race.how}, {name} is the only one that counts: {_best(race.row(best))}."
    what = f"{_best(race.row(best))}; {BACKEND_NAMES[other]} does {_best(race.row(other))}"
    if race.second is not None and race.is_reversed():
        return _reversed(race.how, race.second, best, lead, what)
    quoted = f" ({race.second.in_words(best)})" if race.second is not None else ""
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
    pair = f"{figure(second.throughput[other])} against {figure(second.throughput[best])} items/s"
    contrary = f"{BACKEND_NAMES[other]} {behind:.1f}% faster" if behind > 0 else "the two equal"
    return (
        f"{how}, there is no sure winner: the {second.quoted_phase} has {BACKEND_NAMES[best]} {lead:.1f}% faster "
        f"({what}), but the {second.phase} has {contrary} ({pair})."
    )


def _best(row: Mapping[str, Any]) -> str:
    return f"{figure(row.get(THROUGHPUT))} items/s in chunks of {row.get('client_chunk_size', NONE)}"


def race_card(name: str, race: Race) -> Card:
    """What the sentence says, in two lines."""
    best, second = race.winning(), race.second
    pair = ", ".join(f"{BACKEND_NAMES[each]} {figure(race.row(each).get(THROUGHPUT))}" for each in BACKENDS)
    detail = f"{pair} items/s" if second is None else f"{second.quoted_phase}: {pair}\n{second.in_words('jax')}"
    if best is None:
        return Card(name, "tie" if race.winner.get("backend") == "tie" else "neither", detail)
    if race.is_reversed():
        return Card(name, "no sure winner", detail, "open")
    lead = race.lead(best)
    return Card(name, f"{BACKEND_NAMES[best]}{'' if lead is None else f' {percent(lead)}'}", detail)
