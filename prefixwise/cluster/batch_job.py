"""Batch jobs on a Ray cluster, with Ray Data: a part is a row, a worker is an actor.

Workers read their parts and write the results themselves, so every worker must reach the input and the work folder: a
shared file system or a URL. Only small records come back. Ray gives the part of a dead worker to another one, a few
times. A part's file is complete or absent, so scoring a part twice does no harm.

`WorkerOptions` says which cluster, how many workers, and what each reserves. Ray is imported when a job is scored.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from inspect import signature
from typing import Any

from prefixwise.batch.parts import Part, PartRecord
from prefixwise.batch.storage import needed
from prefixwise.batch.worker import PartScorer, PartTask, RowScorer
from prefixwise.cluster.connection import check_reachable
from prefixwise.contract.errors import BatchError, PrefixwiseError
from prefixwise.engine.engine import ScoringEngine

Resources = Mapping[str, float]  # of a node, or reserved by a worker


@dataclass(frozen=True)
class WorkerOptions:
    """The workers of a job."""

    address: str  # auto: the cluster that this machine belongs to
    min_workers: int | None = None  # None: as many as fit
    max_workers: int | None = None
    num_cpus: float | None = None  # per worker; None: 1, or Ray's default beside other devices
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def cpus(self) -> float | None:
        """None: Ray's default. Ray advises against a number beside GPUs."""
        return 1.0 if self.num_cpus is None and not self.num_gpus and not self.resources else self.num_cpus

    def pool(self, nodes: Sequence[Resources], num_parts: int) -> tuple[int, int]:
        """The fewest and the most workers, never more than parts. Raises BatchError where not even one fits."""
        fit = self.most_that_fit(nodes)
        if fit < 1:
            available = "; ".join(sorted({_shown(node) for node in nodes if _plain(node)})) or "nothing"
            raise BatchError(f"a worker needs {_shown(self._needs())}, and no node has that: they have {available}")
        least = min(self.min_workers or 1, max(1, num_parts))
        most = min(self.max_workers or min(fit, max(1, num_parts)), max(1, num_parts))
        return least, max(least, most)

    def most_that_fit(self, nodes: Sequence[Resources]) -> int:
        """A worker runs on one node, so the rests of two nodes do not add up."""
        needs = self._needs()
        return sum(_times(needs, node) for node in nodes) if needs else 1

    def _needs(self) -> dict[str, float]:
        needs = {"CPU": self.cpus or 0.0, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount}


def parse_count(text: str | None) -> tuple[int | None, int | None]:
    """Parse `4` or `1:8`. Raises BatchError."""
    if text is None:
        return None, None
    least, colon, most = text.partition(":")
    most = most if colon else least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise BatchError(f"workers must be a number like 4, or a range like 1:8, got {text!r}")
    return int(least), int(most)


def parse_resources(texts: Sequence[str]) -> dict[str, float]:
    """Parse `TPU=4`. Raises BatchError."""
    resources = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = math.nan
        if not name or not resources[name] > 0 or math.isinf(resources[name]):
            raise BatchError(f"a worker's resource must be like TPU=4, got {text!r}")
    return resources


def _times(needs: Resources, node: Resources) -> int:
    return math.floor(min(node.get(name, 0.0) / amount for name, amount in needs.items()))


def _shown(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(_plain(resources).items())) or "nothing"


def _plain(resources: Resources) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}


# How often Ray restarts a worker and retries a part. A model or a part that kills every worker must end the job; nodes
# that come and go must not.
_RESTARTS = {"max_restarts": 20, "max_task_retries": 5}

OpenEngine = Callable[[], ScoringEngine]  # is sent to the workers


class PartWorker:
    """A worker with its own engine."""

    def __init__(self, task: PartTask, open_engine: OpenEngine) -> None:
        self._scorer: PartScorer | PrefixwiseError
        try:
            self._scorer = PartScorer(RowScorer(open_engine(), task.defaults), task)
        except PrefixwiseError as error:
            self._scorer = error

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Failures are returned, not raised: Ray would retry them and wrap their message in a traceback."""
        part = Part(**{name: int(value) for name, value in row.items()})
        try:
            return {**_record_row(self._score(part)), "failure": ""}
        except PrefixwiseError as error:
            return {**_record_row(PartRecord(part.index, 0, 0, 0)), "failure": str(error)}

    def _score(self, part: Part) -> PartRecord:
        if isinstance(self._scorer, PrefixwiseError):
            raise self._scorer
        return self._scorer.score(part)


def _record_row(record: PartRecord) -> dict[str, Any]:
    return {**asdict(record), "warnings": "\n".join(record.warnings)}


def _record(row: dict[str, Any]) -> PartRecord:
    """The record of a part. Raises BatchError where the worker has failed."""
    failure = row.pop("failure")
    if failure:
        raise BatchError(f"a worker failed: {failure}")
    return PartRecord(**{**row, "warnings": tuple(filter(None, row["warnings"].split("\n")))})


def score_on_cluster(
    parts: Sequence[Part], task: PartTask, open_engine: OpenEngine, workers: WorkerOptions
) -> Iterator[PartRecord]:
    """Yield records as parts become complete, in any order. Raises BatchError."""
    with needed("ray"):
        import ray
        import ray.data

    _connect(ray, workers.address)
    try:
        records = _dataset(ray, parts, task, open_engine, workers)
        for row in records.iter_rows():
            yield _record(row)
    except ray.exceptions.RayActorError as error:
        message = f"workers died again and again ({_first_sentence(error)}); their logs, on the cluster, say why"
        raise BatchError(message) from error
    except ray.exceptions.RayError as error:
        raise BatchError(f"the cluster failed: {_last_line(error)}") from error
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Ray's messages go to its own log, because the terminal shows a progress bar; `--log-level info` shows them."""
    if not logging.getLogger().isEnabledFor(logging.INFO):
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        check_reachable(address)
        with _sigterm_restored():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BatchError(f"no Ray cluster answers at {address}: {_last_line(error)}") from None


@contextmanager
def _sigterm_restored() -> Iterator[None]:
    """Ray installs its own handler of SIGTERM, which ends the process with another status."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _dataset(ray: Any, parts: Sequence[Part], task: PartTask, open_engine: OpenEngine, workers: WorkerOptions) -> Any:
    """A dataset of records, computed as it is read."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    least, most = workers.pool(nodes, len(parts))
    rows = [asdict(part) for part in parts]
    resources = {"resources": dict(workers.resources)} if workers.resources else {}
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    with warnings.catch_warnings(action="ignore"):  # deprecations: `_restart_limits` looks at the signature
        return dataset.map(
            PartWorker,
            fn_constructor_args=(task, open_engine),
            compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=2),
            num_cpus=workers.cpus,
            num_gpus=workers.num_gpus or None,
            **_restart_limits(dataset.map),
            **resources,
        )


def _restart_limits(ray_map: Callable[..., Any]) -> dict[str, Any]:
    """Limits of restarts, where this Ray Data accepts them; others retry without end."""
    name = "ray_remote_args_fn"
    return {name: lambda: dict(_RESTARTS)} if name in signature(ray_map).parameters else {}


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _first_sentence(error: BaseException) -> str:
    return _last_line(error).partition(". ")[0]
