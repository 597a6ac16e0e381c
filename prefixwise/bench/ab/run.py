"""`bench ab`: variants on one machine, run in turns, their times paired by round and their scores held together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixwise.bench.ab.intervals import geometric_mean, round_medians, speed_ratio
from prefixwise.bench.ab.report import notes_of
from prefixwise.bench.ab.variants import Variant, round_orders
from prefixwise.bench.artifacts import (
    AB_VERSION,
    AbResult,
    AbRun,
    AbVariant,
    CorrectnessThresholds,
    ScoreDifferences,
    Scores,
)
from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.files import now_utc
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.rules import MAX_ABS_DIFF, MEAN_ABS_DIFF, percentile, score_differences
from prefixwise.bench.servers import local_server

Tell = Callable[[str], None]
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_SHARED = 0  # the number of the request that all variants score


@dataclass(frozen=True)
class AbPlan:
    """What is compared, how often, with which queries, and how far scores may differ."""

    compare: str
    model: str | None = None  # the embedded one
    rounds: int = 10
    runs_per_round: int = 3
    warmup_runs: int = 1
    cached: bool = True  # every run the same request; else every run another query
    seed: int = 0
    max_abs_diff: float = MAX_ABS_DIFF
    mean_abs_diff: float = MEAN_ABS_DIFF


@dataclass
class Contestant:
    """A variant, the server it runs on, and what it has done so far."""

    variant: Variant
    client: ScoreClient
    server_config: dict[str, Any]
    runs: list[AbRun] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)  # of the shared request, every time
    failure: str | None = None


@dataclass(frozen=True)
class ServerSetup:
    """What all servers of a comparison have in common."""

    flags: Sequence[str]
    timeout_sec: float = 600.0
    api_key: str | None = None  # they ask for it, and the client has it

    def environment(self) -> dict[str, str]:
        """They are alive at the same time: none of them may take most of an accelerator's memory beforehand, as JAX
        does. Who has set that has decided it."""
        preallocate = os.environ.get(_PREALLOCATE, "false")
        return {_PREALLOCATE: preallocate, **({} if self.api_key is None else {"PREFIXWISE_API_KEY": self.api_key})}


def start_contestants(
    stack: ExitStack, variants: Sequence[Variant], setup: ServerSetup, log_dir: Path, tell: Tell
) -> list[Contestant]:
    """A server for each set of flags, all of them until the stack is closed. Raises ServerStartError."""
    clients: dict[tuple[str, ...], ScoreClient] = {}
    for variant in variants:
        if variant.server_flags not in clients:
            tell(" ".join(variant.server_flags))
            log = log_dir / f"server-{len(clients)}.log"
            flags = [*setup.flags, *variant.server_flags]
            server = stack.enter_context(local_server(flags, log, env=setup.environment()))
            client = ScoreClient(server.url, timeout_sec=setup.timeout_sec, api_key=setup.api_key)
            clients[variant.server_flags] = stack.enter_context(client)
    return [
        Contestant(variant, clients[variant.server_flags], clients[variant.server_flags].server_info())
        for variant in variants
    ]


class AbMeasurement:
    """Runs the contestants in turns. One that fails is left out from there on; the others go on."""

    def __init__(self, contestants: Sequence[Contestant], maker: RequestMaker, plan: AbPlan) -> None:
        self._contestants = contestants
        self._maker = maker
        self._plan = plan
        self._next_number = _SHARED
        self.finished_rounds = 0

    def run(self, tell: Tell) -> None:
        """`tell` hears when the warm-up and each round begin."""
        tell("warm-up")
        for contestant in self._contestants:
            self._call(contestant, _SHARED)
            for _ in range(self._plan.warmup_runs):
                self._call(contestant, self._number())
        for index, order in enumerate(round_orders(len(self._contestants), self._plan.rounds, self._plan.seed)):
            names = [self._contestants[place].variant.name for place in order]
            tell(f"round {index + 1}, {', '.join(names)}")
            for place, which in enumerate(order):
                self._run_once(self._contestants[which], index, place)
            self.finished_rounds += 1

    def result(self) -> AbResult:
        """Of the rounds that are finished; there must be one."""
        plan, geometry = self._plan, self._maker.geometry
        for contestant in self._contestants:  # a round that not all have run has nothing to compare
            contestant.runs = [run for run in contestant.runs if run.round_index < self.finished_rounds]
        thresholds = CorrectnessThresholds(max_abs_diff=plan.max_abs_diff, mean_abs_diff=plan.mean_abs_diff)
        return AbResult(
            schema_version=AB_VERSION,
            generated_at_utc=now_utc(),
            model=plan.model,
            compare=plan.compare,
            geometry=geometry,
            cached=plan.cached,
            rounds=self.finished_rounds,
            runs_per_round=plan.runs_per_round,
            warmup_runs=plan.warmup_runs,
            seed=plan.seed,
            correctness_thresholds=thresholds,
            variants=compare_contestants(self._contestants, geometry.num_items, thresholds),
            cut_short=self.finished_rounds < plan.rounds,
            notes=notes_of(self.finished_rounds, plan.rounds),
        )

    def _run_once(self, contestant: Contestant, round_index: int, place: int) -> None:
        for _ in range(self._plan.runs_per_round):
            seconds = self._call(contestant, self._number())
            if seconds is not None:
                contestant.runs.append(AbRun(round_index=round_index, place=place, seconds=seconds))

    def _number(self) -> int:
        """Of the next request: one that no server has seen, unless prefixes are to be found."""
        if not self._plan.cached:
            self._next_number += 1
        return self._next_number

    def _call(self, contestant: Contestant, number: int) -> float | None:
        """How long it took, None where it failed or has failed before."""
        if contestant.failure is not None:
            return None
        try:
            answer = contestant.client.score(self._maker.request(number, **contestant.variant.request_fields))
        except CallError as error:
            contestant.failure = str(error)
            return None
        if number == _SHARED:
            contestant.scores.append(answer.scores)
        return answer.seconds


def compare_contestants(
    contestants: Sequence[Contestant], num_items: int, thresholds: CorrectnessThresholds
) -> list[AbVariant]:
    """The figures of each, and how they stand to the first one's."""
    return [_figures(each, contestants[0], num_items, thresholds) for each in contestants]


def _figures(own: Contestant, first: Contestant, num_items: int, thresholds: CorrectnessThresholds) -> AbVariant:
    seconds = [run.seconds for run in own.runs] if own.failure is None else []
    time = geometric_mean(round_medians(own.runs)) if seconds else None
    comparable = bool(seconds) and first.failure is None
    differences = _differences(own, first)
    return AbVariant(
        name=own.variant.name,
        server_flags=list(own.variant.server_flags),
        request_fields=dict(own.variant.request_fields),
        server_config=own.server_config,
        status="ok" if own.failure is None else "failed",
        failure=own.failure,
        time_ms=None if time is None else time * 1000,
        median_ms=percentile(seconds, 50) * 1000 if seconds else None,
        p95_ms=percentile(seconds, 95) * 1000 if seconds else None,
        items_per_sec=None if time is None else num_items / time,
        speed_vs_first=speed_ratio(round_medians(first.runs), round_medians(own.runs)) if comparable else None,
        scores_vs_first=differences,
        scores_agree=differences is not None
        and differences.max_abs_diff <= thresholds.max_abs_diff
        and differences.mean_abs_diff <= thresholds.mean_abs_diff,
        runs=own.runs,
    )


def _differences(own: Contestant, first: Contestant) -> ScoreDifferences | None:
    """All its answers to the shared request against the first one's first: a variant that wavers is seen, too."""
    if not own.scores or not first.scores:
        return None
    rows = [row for scores in own.scores for row in scores]
    found = score_differences(rows, first.scores[0] * len(own.scores))
    return ScoreDifferences(
        max_abs_diff=found.max_abs_diff, mean_abs_diff=found.mean_abs_diff, num_compared=found.num_compared
    )
