"""What `score` and `rerank` share: one request to a model of this process or to a server, and notes on its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

from prefixwise.cli.engine_options import open_engine
from prefixwise.cli.failures import print_warning
from prefixwise.cli.output import say
from prefixwise.cli.progress import item_progress, print_loading, warmup_progress
from prefixwise.contract.errors import count
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.cli.server_address import ServerAddress
    from prefixwise.client.client import Client
    from prefixwise.contract.result import Truncation, Usage
    from prefixwise.engine.engine import OnProgress, ScoringEngine

Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class Finished(Generic[Result_co]):
    """A finished request."""

    result: Result_co
    num_items: int
    where: str  # what scored: backend, device and dtype, or a server's address
    load_seconds: float | None  # None: a server's model, which was loaded before
    run_seconds: float


def run_request(
    options: EngineOptions,
    num_items: int,
    run: Callable[[ScoringEngine, OnProgress | None], Result_co],
    *,
    quiet: bool,
) -> Finished[Result_co]:
    """Load the model and `run` the request of `num_items` items."""
    begin = perf_counter()
    print_loading(options.model, quiet=quiet)
    with warmup_progress(quiet=quiet) as on_program:
        engine = open_engine(options, on_program)
    loaded = perf_counter()
    with closing(engine), item_progress(num_items, quiet=quiet) as on_progress:
        result = run(engine, on_progress)
        seconds = perf_counter() - loaded
    backend = engine.backend.info
    where = f"with {backend.name} on {backend.device}, {backend.dtype}"
    return Finished(result, num_items, where, loaded - begin, seconds)


def ask_server(server: ServerAddress, num_items: int, ask: Callable[[Client], Result_co]) -> Finished[Result_co]:
    """`ask` the server, whose model is loaded."""
    begin = perf_counter()
    with server.open() as client:
        result = ask(client)
    return Finished(result, num_items, f"at {client.url}", None, perf_counter() - begin)


MAX_NAMED = 5  # items that a note names; further ones are only counted


def print_truncated(truncated: Sequence[Truncation], num_items: int, noun: str) -> None:
    """Print which items were truncated, and to how many tokens."""
    if not truncated:
        return
    indices = ", ".join(str(cut.index) for cut in truncated[:MAX_NAMED])
    more = ", ..." if len(truncated) > MAX_NAMED else ""
    lengths = {cut.kept_tokens for cut in truncated}
    num_tokens = ("at most " if len(lengths) > 1 else "") + count(max(lengths), "token")
    print_warning(f"{len(truncated)} of {count(num_items, noun)} cut to {num_tokens}: index {indices}{more}")


def print_debug(debug: Mapping[str, object] | None) -> None:
    """Print the debug block, one line per key and per batch, without its attention layout."""
    for key, value in (debug or {}).items():
        if key == "layout":
            continue
        if isinstance(value, list):
            for position, entry in enumerate(value):
                say(f"{key}[{position}]: {json.dumps(entry)}")
        else:
            say(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")


def run_summary(model: str, finished: Finished[object], debug: Mapping[str, object] | None) -> str:
    """Model, what scored it, and the algorithm; no `debug` if no item could be scored, or a server was not asked."""
    algorithm = f", {debug['algorithm']}" if debug else ""
    return f"{model} {finished.where}{algorithm}"


def size_and_time(finished: Finished[object], noun: str, usage: Usage) -> str:
    """Items, tokens and seconds."""
    num_items, num_tokens = count(finished.num_items, noun), count(usage.prompt_tokens, "token")
    return f"{num_items}, {num_tokens} in {finished.run_seconds:.2f} s"


def load_time(finished: Finished[object]) -> str:
    """The time to load the model, which a second request in this process would not need; empty for a server."""
    return "" if finished.load_seconds is None else f" (model loaded in {finished.load_seconds:.1f} s)"
