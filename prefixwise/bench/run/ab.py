"""`bench ab`: the variants of each comparison, and the measurement in turns on one machine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.files import now_utc
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.ab import (
    AB_VERSION,
    AbResult,
    AbRun,
    AbVariant,
    ScoreDifferences,
    geometric_mean,
    notes_of,
    round_medians,
    speed_ratio,
)
from prefixwise.bench.kinds.base import Scores
from prefixwise.bench.kinds.score_matrix import CorrectnessThresholds
from prefixwise.bench.processes import local_server
from prefixwise.bench.rules import MAX_ABS_DIFF, MEAN_ABS_DIFF, percentile, score_differences
from prefixwise.contract.errors import PrefixwiseError

ComparedSetting = Literal["mask", "algorithm", "backend", "chunk-size"]


VARIANT_NAMES: dict[ComparedSetting, tuple[str, ...]] = {
    "mask": ("dense", "segment"),
    "algorithm": ("packed", "prefill_extend", "serial"),
    "backend": ("jax", "torch"),
    "chunk-size": ("8", "32", "128", "0"),  # 0: no bound
}


_SERVER_FLAGS: dict[ComparedSetting, str] = {
    "mask": "--multi-item-mask-impl",
    "backend": "--backend",
    "chunk-size": "--multi-item-scoring-chunk-size",
}


class ComparisonError(PrefixwiseError):
    """There is no such variant, or too few of them; the message names those that there are."""


@dataclass(frozen=True)
class Variant:
    """One of those compared; those with the same flags share a server."""

    name: str
    server_flags: tuple[str, ...] = ()
    request_fields: dict[str, str] = field(default_factory=dict)


def variants_of(
    compare: ComparedSetting, names: Sequence[str] | None, *, algorithm: str = "auto", mask: str = "auto"
) -> list[Variant]:
    """The variants of a comparison; the first is the baseline.

    `algorithm` and `mask` are for the comparisons of something else; where masks are compared, `mask` comes first,
    unless it is auto. Raises ComparisonError.
    """
    ordered = list(names or VARIANT_NAMES[compare])
    _check_names(compare, ordered)
    if compare == "mask" and names and mask not in ("auto", ordered[0]):
        raise ComparisonError(f"--mask is the baseline of masks: expected {ordered[0]}, the first variant, got {mask}")
    if compare == "mask" and not names:
        ordered.sort(key=lambda name: name != mask)
    if compare == "algorithm":
        return [Variant(name, ("--multi-item-mask-impl", mask), {"algorithm": name}) for name in ordered]
    shared = () if compare == "mask" else ("--multi-item-mask-impl", mask)
    return [Variant(name, (*shared, _SERVER_FLAGS[compare], name), {"algorithm": algorithm}) for name in ordered]


def _check_names(compare: ComparedSetting, names: Sequence[str]) -> None:
    known = VARIANT_NAMES[compare]
    is_known = str.isdecimal if compare == "chunk-size" else known.__contains__
    if len(set(names)) < max(2, len(names)) or not all(map(is_known, names)):
        expected = "numbers like 8,32,0" if compare == "chunk-size" else f"among {','.join(known)}"
        raise ComparisonError(f"--variants must be two or more, each once, {expected}, got {','.join(names)}")


def round_orders(num_variants: int, rounds: int, seed: int) -> list[list[int]]:
    """A random order for each round; over as many rounds as variants, each variant has every place once.

    So none always runs on a machine that another has heated up.
    """
    rng = random.Random(seed)
    orders: list[list[int]] = []
    while len(orders) < rounds:
        base = rng.sample(range(num_variants), num_variants)
        orders += [base[start:] + base[:start] for start in range(num_variants)]
    return orders[:rounds]


OnProgress = Callable[[str], None]


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
class RunningVariant:
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


def start_variants(
    stack: ExitStack, variants: Sequence[Variant], setup: ServerSetup, log_dir: Path, on_progress: OnProgress
) -> list[RunningVariant]:
    """A server for each set of flags, all of them until the stack is closed. Raises ServerStartError."""
    clients: dict[tuple[str, ...], ScoreClient] = {}
    for variant in variants:
        if variant.server_flags not in clients:
            on_progress(" ".join(variant.server_flags))
            log = log_dir / f"server-{len(clients)}.log"
            flags = [*setup.flags, *variant.server_flags]
            server = stack.enter_context(local_server(flags, log, env=setup.environment()))
            client = ScoreClient(server.url, timeout_sec=setup.timeout_sec, api_key=setup.api_key)
            clients[variant.server_flags] = stack.enter_context(client)
    return [
        RunningVariant(variant, clients[variant.server_flags], clients[variant.server_flags].server_info())
        for variant in variants
    ]


class AbMeasurement:
    """Runs the variants in turns. After a failure a variant is left out."""

    def __init__(self, running: Sequence[RunningVariant], maker: RequestMaker, plan: AbPlan) -> None:
        self._variants = running
        self._maker = maker
        self._plan = plan
        self._next_number = _SHARED
        self.finished_rounds = 0

    def run(self, on_progress: OnProgress) -> None:
        """Calls `on_progress` at the start of the warm-up and of each round."""
        on_progress("warm-up")
        for variant_run in self._variants:
            self._call(variant_run, _SHARED)
            for _ in range(self._plan.warmup_runs):
                self._call(variant_run, self._number())
        for index, order in enumerate(round_orders(len(self._variants), self._plan.rounds, self._plan.seed)):
            names = [self._variants[place].variant.name for place in order]
            on_progress(f"round {index + 1}, {', '.join(names)}")
            for place, which in enumerate(order):
                self._run_once(self._variants[which], index, place)
            self.finished_rounds += 1

    def result(self) -> AbResult:
        """The result of the finished rounds; there must be at least one."""
        plan, geometry = self._plan, self._maker.geometry
        for variant_run in self._variants:  # a round that not all have run has nothing to compare
            variant_run.runs = [run for run in variant_run.runs if run.round_index < self.finished_rounds]
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
            variants=compare_variants(self._variants, geometry.num_items, thresholds),
            cut_short=self.finished_rounds < plan.rounds,
            notes=notes_of(self.finished_rounds, plan.rounds),
        )

    def _run_once(self, variant_run: RunningVariant, round_index: int, place: int) -> None:
        for _ in range(self._plan.runs_per_round):
            seconds = self._call(variant_run, self._number())
            if seconds is not None:
                variant_run.runs.append(AbRun(round_index=round_index, place=place, seconds=seconds))

    def _number(self) -> int:
        """The number of the next request: a new one, unless prefixes shall be cached."""
        if not self._plan.cached:
            self._next_number += 1
        return self._next_number

    def _call(self, variant_run: RunningVariant, number: int) -> float | None:
        """The seconds of the call; None where the variant has failed."""
        if variant_run.failure is not None:
            return None
        try:
            answer = variant_run.client.score(self._maker.request(number, **variant_run.variant.request_fields))
        except CallError as error:
            variant_run.failure = str(error)
            return None
        if number == _SHARED:
            variant_run.scores.append(answer.scores)
        return answer.seconds


def compare_variants(
    running: Sequence[RunningVariant], num_items: int, thresholds: CorrectnessThresholds
) -> list[AbVariant]:
    """The metrics of each variant, and the ratios to the first one's."""
    return [_metrics(each, running[0], num_items, thresholds) for each in running]


def _metrics(
    own: RunningVariant, first: RunningVariant, num_items: int, thresholds: CorrectnessThresholds
) -> AbVariant:
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


def _differences(own: RunningVariant, first: RunningVariant) -> ScoreDifferences | None:
    """All its answers to the shared request against the first one's first: a variant that wavers is seen, too."""
    if not own.scores or not first.scores:
        return None
    rows = [row for scores in own.scores for row in scores]
    found = score_differences(rows, first.scores[0] * len(own.scores))
    return ScoreDifferences(
        max_abs_diff=found.max_abs_diff, mean_abs_diff=found.mean_abs_diff, num_compared=found.num_compared
    )
