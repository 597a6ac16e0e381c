"""The parts of a batch job scored on a Ray cluster, with Ray Data: a part is a row, a worker is an actor.

Workers read their parts and write the parts' objects themselves, so every worker must reach the input and the work
folder: a shared file system or a URL. Only small records come back here. A part whose worker died is given to another
one by Ray, a few times; since an object is there whole or not at all, a part that was done twice is there once.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from typing import Any

from prefixwise.batch.needs import needed
from prefixwise.batch.parts import Part, PartRecord
from prefixwise.batch.score_parts import PartScorer, PartTask
from prefixwise.cluster.addresses import check_reachable
from prefixwise.cluster.workers import WorkerOptions
from prefixwise.contract.errors import BatchError, PrefixwiseError
from prefixwise.engine.engine import ScoringEngine

# How often Ray starts a worker again and gives a part to another one. A worker that dies of its model, or a part that
# every worker dies of, must end the job; nodes that come and go must not.
_DEATHS = {"max_restarts": 20, "max_task_retries": 5}

OpenEngine = Callable[[], ScoringEngine]  # travels to the workers


class PartWorker:
    """One worker, with an engine of its own."""

    def __init__(self, task: PartTask, open_engine: OpenEngine) -> None:
        self._scorer: PartScorer | PrefixwiseError
        try:
            self._scorer = PartScorer(open_engine(), task)
        except PrefixwiseError as error:
            self._scorer = error

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """A failure is an answer: Ray would try it again, and wrap its words in a page of its own."""
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
    """Raises BatchError where the worker has failed."""
    failure = row.pop("failure")
    if failure:
        raise BatchError(f"a worker could not go on: {failure}")
    return PartRecord(**{**row, "warnings": tuple(filter(None, row["warnings"].split("\n")))})


def score_on_cluster(
    parts: Sequence[Part], task: PartTask, open_engine: OpenEngine, workers: WorkerOptions
) -> Iterator[PartRecord]:
    """Gives records as parts become complete, in any order. Raises BatchError."""
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
        raise BatchError(f"the cluster could not go on: {_last_line(error)}") from error
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """What Ray has to say goes to its own log: here is a progress bar. `--log-level info` shows it all the same."""
    if not logging.getLogger().isEnabledFor(logging.INFO):
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        check_reachable(address)
        with _sigterm_as_it_was():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BatchError(f"no Ray cluster answers at {address}: {_last_line(error)}") from None


@contextmanager
def _sigterm_as_it_was() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and ends the process with a status of its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _dataset(ray: Any, parts: Sequence[Part], task: PartTask, open_engine: OpenEngine, workers: WorkerOptions) -> Any:
    """Of records, which are computed as they are read."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    least, most = workers.pool(nodes, len(parts))
    rows = [asdict(part) for part in parts]
    resources = {"resources": dict(workers.resources)} if workers.resources else {}
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    with warnings.catch_warnings(action="ignore"):  # of what a later Ray will not take any more: `_bounds` asks it
        return dataset.map(
            PartWorker,
            fn_constructor_args=(task, open_engine),
            compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=2),
            num_cpus=workers.cpus,
            num_gpus=workers.num_gpus or None,
            **_bounds(dataset.map),
            **resources,
        )


def _bounds(ray_map: Callable[..., Any]) -> dict[str, Any]:
    """Of deaths, where Ray Data has a way to say them; a Ray that has none tries without end."""
    name = "ray_remote_args_fn"
    return {name: lambda: dict(_DEATHS)} if name in signature(ray_map).parameters else {}


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _first_sentence(error: BaseException) -> str:
    return _last_line(error).partition(". ")[0]
