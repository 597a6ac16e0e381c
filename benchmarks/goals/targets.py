"""The goals, what was measured, and whether the one is met by the other: no model, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import print_exc
from typing import Any, Literal


@dataclass(frozen=True)
class Measured:
    """One figure of one backend."""

    name: str  # a case's, or a case's and what else was seen there
    title: str
    value: float | None  # None: cannot be known here
    unit: str
    flops: float | None = None  # per second, by the floor's count
    gemm: Literal["contract", "full"] = "contract"  # which rate of GEMMs it stands beside
    bound: float | None = None  # the goal, where it depends on this run
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """A bound on what is measured under a name."""

    name: str
    bound: float | None  # None: `Measured.bound`
    holder: Literal["jax", "torch", "better", "each"] = "better"  # whose figure must meet it
    at_most: bool = False

    def is_met(self, value: float | None, bound: float | None) -> bool | None:
        """None where one of the two is not known."""
        if value is None or bound is None:
            return None
        return value <= bound if self.at_most else value >= bound


GOALS = (
    Goal("cold", 18_000, "jax"),
    Goal("cold", 16_500, "torch"),
    Goal("cold fill", 0.95, "each"),
    Goal("cached", 20_000, "jax"),
    Goal("cached", 19_000, "torch"),
    Goal("http", 15_000),
    Goal("http8", 17_500),
    Goal("small", 4, at_most=True),
    Goal("poisson", 1000),
    Goal("poisson fill", 0.85, "each"),
    Goal("poisson20", 500),
    Goal("sglang", 3400),
    *(
        goal
        for case in ("beside_many", "beside_long")
        for goal in (
            Goal(f"{case} p50", 25, at_most=True),
            Goal(f"{case} p99", 40, at_most=True),
            Goal(f"{case} rate", 0.95),
        )
    ),
    Goal("many", None, "each"),
    Goal("many memory", None, "each", at_most=True),
    Goal("long", 0.60),
    Goal("fp8 cold", 21_000, "torch"),
    Goal("fp8 cached", 24_000, "torch"),
    Goal("fp8 http8", 22_500, "torch"),
    Goal("fp8 width 4B", 1.6, "torch"),
    Goal("fp8 width 8B", 1.6, "torch"),
    Goal("fp8 load", 10, "torch", at_most=True),
)


def attempt(name: str, measure: Callable[[], Sequence[Measured]], errors: dict[str, str]) -> Sequence[Measured]:
    """What is measured, or nothing and an error by its name: one figure that cannot be had must not cost the others."""
    try:
        return measure()
    except Exception as error:
        print_exc()
        errors[name] = f"{type(error).__name__}: {error}"
        return ()


def judge(
    found: Mapping[str, Sequence[Measured]],
    gemm: Mapping[str, Mapping[str, float]],
    goals: Sequence[Goal] = GOALS,
) -> list[dict[str, Any]]:
    """Rows for the table and the file: one name after the other, the backends' figures below each other.

    `found`: by backend; `gemm`: FLOP/s of GEMMs, by backend and `Measured.gemm`, where they were measured.
    """
    names = list(dict.fromkeys(each.name for rows in found.values() for each in rows))
    pairs = [(backend, each) for name in names for backend, rows in found.items() for each in rows if each.name == name]
    return [_row(backend, each, _goal_of(backend, each.name, found, goals), gemm[backend]) for backend, each in pairs]


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names and backends of the goals that are not met."""
    return [f"{row['name']} ({row['backend']})" for row in rows if row["met"] is False]


def _goal_of(backend: str, name: str, found: Mapping[str, Sequence[Measured]], goals: Sequence[Goal]) -> Goal | None:
    """The goal that this backend's figure is held to, if any."""
    for goal in goals:
        if goal.name != name:
            continue
        if goal.holder in (backend, "each") or (goal.holder == "better" and backend == _better(goal, found)):
            return goal
    return None


def _better(goal: Goal, found: Mapping[str, Sequence[Measured]]) -> str:
    values = {backend: each.value or 0.0 for backend, rows in found.items() for each in rows if each.name == goal.name}
    return (min if goal.at_most else max)(values, key=lambda backend: values[backend])


def _row(backend: str, measured: Measured, goal: Goal | None, gemm: Mapping[str, float]) -> dict[str, Any]:
    rate = gemm.get(measured.gemm) if measured.flops is not None else None
    bound = None if goal is None else goal.bound if goal.bound is not None else measured.bound
    return {
        "name": measured.name,
        "backend": backend,
        "title": measured.title,
        "measured": _rounded(measured.value),
        "unit": measured.unit,
        "goal": _rounded(bound),
        "at_most": goal is not None and goal.at_most,
        "met": None if goal is None else goal.is_met(measured.value, bound),
        "tflops": None if measured.flops is None else round(measured.flops / 1e12, 2),
        "gemm_tflops": None if rate is None else round(rate / 1e12, 2),
        "fraction_of_gemm": None if rate is None else round((measured.flops or 0.0) / rate, 4),
        "note": measured.note,
        **({"details": measured.details} if measured.details else {}),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
