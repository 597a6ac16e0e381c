"""One request from the command line to its result, with signs of life on the way: what `score` and `rerank` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

from prefixwise.cli.engine_options import open_engine
from prefixwise.cli.progress import item_progress, tell_loading, warmup_progress
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.engine.engine import OnProgress, ScoringEngine
    from prefixwise.forward.backend import BackendInfo

Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Finished(Generic[Result_co]):
    """A request that is done."""

    result: Result_co
    num_items: int
    backend: BackendInfo
    load_seconds: float
    run_seconds: float


def run_request(
    options: EngineOptions,
    num_items: int,
    run: Callable[[ScoringEngine, OnProgress | None], Result_co],
    *,
    quiet: bool,
) -> Finished[Result_co]:
    """Load the model, and `run` the request of so many items on it."""
    begin = perf_counter()
    tell_loading(options.model, quiet=quiet)
    with warmup_progress(quiet=quiet) as on_program:
        engine = open_engine(options, on_program)
    loaded = perf_counter()
    with item_progress(num_items, quiet=quiet) as on_progress:
        result = run(engine, on_progress)
    return Finished(result, num_items, engine.backend.info, loaded - begin, perf_counter() - loaded)
