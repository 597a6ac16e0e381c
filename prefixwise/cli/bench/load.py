"""`prefixwise bench load`: how a server does under load, open loop or closed loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixwise.cli.bench import geometry_options as shape_option
from prefixwise.cli.bench_common import ApiKey, Timeout, last_line, print_server_info
from prefixwise.cli.failures import FAILED, MISUSED, CommandError, print_error
from prefixwise.cli.flags import finite
from prefixwise.cli.output import say
from prefixwise.cli.progress import step_progress

if TYPE_CHECKING:
    from prefixwise.bench.geometry import Preset, RequestMaker
    from prefixwise.bench.kinds.load import LoadResult
    from prefixwise.bench.run.load import LoadPlan
    from prefixwise.bench.run.load_driver import LoadTarget, PhaseLength

Mode = Literal["open", "closed"]
_USUAL_SECONDS = 30.0

Url = Annotated[str, typer.Option(metavar="URL", help="The server, with or without /v1/score.")]
ModeOption = Annotated[
    Mode,
    typer.Option(
        "--mode", metavar="NAME", help="open (requests come when they come) or closed (each waits for an answer)."
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="QPS", min=0.001, callback=finite, help="Open loop: mean rate of the Poisson arrivals; the geometry's."
    ),
]
Concurrency = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Closed loop: requests in flight; 1 when left out.")
]
DistinctQueries = Annotated[
    int, typer.Option(metavar="N", min=0, help="Queries that requests take turns with; 0: each has its own.")
]
Duration = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0.001, callback=finite, help="How long requests are sent; 30 when left out."),
]
NumRequests = Annotated[int | None, typer.Option(metavar="N", min=1, help="How many are sent, where that comes first.")]
WarmupSec = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0.0, callback=finite, help="Sent before, and in no metric; 0: none."),
]
WarmupRequests = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="The same by number; 10 when both are left out.")
]
P99Bound = Annotated[
    float | None,
    typer.Option(metavar="MS", min=0.001, callback=finite, help="Report the goodput: what is answered within it."),
]
FindRate = Annotated[
    bool,
    typer.Option("--find-rate", metavar="", help="Search the highest rate that meets --p99-bound-ms, from --rate on."),
]
MinArrivals = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="--find-rate: arrivals of every rate tried, 200 when left out; it goes on for them, up to 120 s.",
    ),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Open loop: arrivals that would be more are dropped and counted; 512 when left out."
    ),
]
ClientProcesses = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Processes that send, each its share; when left out one for 1,000 requests/s or 32 in flight (3 for "
        "--find-rate), at most one for two cores.",
    ),
]
Output = Annotated[Path | None, typer.Option("--output-json", metavar="FILE", help="Where the artifact goes.")]


def bench_load(
    url: Url = "http://127.0.0.1:30000",
    mode: ModeOption = "open",
    rate: Rate = None,
    concurrency: Concurrency = None,
    geometry: shape_option.GeometryPreset = "contract",
    query_tokens: shape_option.QueryTokens = None,
    num_items: shape_option.NumItems = None,
    item_tokens: shape_option.ItemTokens = None,
    label_token_ids: shape_option.LabelTokenIds = None,
    vocab_size: shape_option.VocabSize = None,
    distinct_queries: DistinctQueries = 0,
    duration_sec: Duration = None,
    num_requests: NumRequests = None,
    warmup_sec: WarmupSec = None,
    warmup_requests: WarmupRequests = None,
    p99_bound_ms: P99Bound = None,
    find_rate: FindRate = False,
    min_arrivals: MinArrivals = None,
    max_in_flight: MaxInFlight = None,
    client_processes: ClientProcesses = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of arrivals and tokens.")] = 0,
    timeout_sec: Timeout = 180.0,
    api_key: ApiKey = None,
    output_json: Output = None,
) -> None:
    """Drive a server with requests: rates, latency percentiles, errors by code, goodput.

    Latency counts from when a request was meant to be sent, so a server that stalls cannot hide it. Rates are per
    second of sending, or until the answers were there where the server fell behind; one that hangs is not waited for.
    With the same seed a server that keeps prefixes has seen the queries of an earlier run: give another one.
    """
    shape = shape_option.shape_of(geometry, query_tokens, num_items, item_tokens)
    given = {"--rate": rate, "--find-rate": find_rate or None, "--max-in-flight": max_in_flight}
    _check_mode(mode, {**given, "--concurrency": concurrency})
    length = _length(duration_sec, num_requests), _warmup(warmup_sec, warmup_requests)
    plan = _plan(mode, rate or shape.rate_qps, concurrency, *length, p99_bound_ms, find_rate, min_arrivals, seed)
    plan = _with_client_processes(plan, client_processes)
    info, target = _server(url, timeout_sec, max_in_flight, api_key)
    tokens = (label_token_ids, vocab_size, distinct_queries, seed)
    _run(target, _maker(shape, info, *tokens), plan, info, output_json)


def _maker(
    shape: Preset, info: dict[str, Any], labels: str | None, vocab_size: int | None, distinct_queries: int, seed: int
) -> RequestMaker:
    return shape_option.make_requests(
        shape, info, labels=labels, vocab_size=vocab_size, distinct_queries=distinct_queries, seed=seed
    )


def _check_mode(mode: Mode, given: Mapping[str, object]) -> None:
    """Refuse options of the other mode."""
    for option, value in given.items():
        its_mode = "closed" if option == "--concurrency" else "open"
        if value is not None and mode != its_mode:
            raise CommandError(f"{option} is for --mode {its_mode}, got it with --mode {mode}", status=MISUSED)


def _check_search(find_rate: bool, p99_bound_ms: float | None, min_arrivals: int | None) -> None:
    if find_rate and p99_bound_ms is None:
        raise CommandError("--find-rate needs --p99-bound-ms", status=MISUSED)
    if min_arrivals is not None and not find_rate:
        raise CommandError("--min-arrivals is for --find-rate, got it without", status=MISUSED)


def _plan(
    mode: Mode,
    rate: float | None,
    concurrency: int | None,
    length: PhaseLength,
    warmup: PhaseLength | None,
    bound_ms: float | None,
    search: bool,
    min_arrivals: int | None,
    seed: int,
) -> LoadPlan:
    from prefixwise.bench.run.load import LoadPlan

    _check_search(search, bound_ms, min_arrivals)
    if mode == "open" and rate is None:
        raise CommandError("--mode open needs --rate", hint="--geometry small has one: 120", status=MISUSED)
    return LoadPlan(
        mode=mode,
        length=length,
        warmup=warmup,
        rate_qps=rate if mode == "open" else None,
        concurrency=(concurrency or 1) if mode == "closed" else None,
        bound_ms=bound_ms,
        search=search,
        min_arrivals=min_arrivals or LoadPlan.min_arrivals,
        seed=seed,
    )


def _with_client_processes(plan: LoadPlan, given: int | None) -> LoadPlan:
    from prefixwise.bench.run.load import choose_client_processes

    chosen = given or choose_client_processes(plan.rate_qps, plan.concurrency, search=plan.search)
    return replace(plan, client_processes=chosen)


def _length(seconds: float | None, requests: int | None) -> PhaseLength:
    from prefixwise.bench.run.load_driver import PhaseLength

    return PhaseLength(_USUAL_SECONDS if seconds is None and requests is None else seconds, requests)


def _warmup(seconds: float | None, requests: int | None) -> PhaseLength | None:
    from prefixwise.bench.run.load_driver import PhaseLength

    if seconds is None and requests is None:
        return PhaseLength(requests=10)
    return None if 0 in (seconds, requests) else PhaseLength(seconds, requests)


def _server(
    url: str, timeout_sec: float, max_in_flight: int | None, api_key: str | None
) -> tuple[dict[str, Any], LoadTarget]:
    """The server's report and the load target. Raises UnreachableError where there is no server."""
    from prefixwise.bench.client import ScoreClient
    from prefixwise.bench.run.load_driver import LoadTarget

    with ScoreClient(url, timeout_sec=timeout_sec, api_key=api_key) as client:
        client.check_reachable()
        target = LoadTarget(client.base_url, timeout_sec, max_in_flight or LoadTarget.max_in_flight, api_key)
        return print_server_info(client), target


def _run(
    target: LoadTarget, maker: RequestMaker, plan: LoadPlan, info: dict[str, Any], output_json: Path | None
) -> None:
    """Run to the end, or to an interrupt: then the partial result is reported before the program ends."""
    from prefixwise.bench.files import write_artifact
    from prefixwise.bench.run.load import LoadRun

    def keep(result: LoadResult) -> None:
        if output_json is not None:
            write_artifact(output_json, result)

    with _steps(plan) as step:
        load = LoadRun(target, maker, plan, step, server_config=info, keep=keep)
        try:
            result, interrupt = load.run(), None
        except (KeyboardInterrupt, SystemExit) as raised:
            done = load.result_so_far()
            if done is None:
                raise
            result, interrupt = done, raised
    _report(result, output_json)
    if interrupt is not None:
        raise interrupt
    _judge(result)


def _steps(plan: LoadPlan) -> AbstractContextManager[Callable[[str], None]]:
    if plan.search:  # the number of phases is unknown
        return nullcontext(lambda title: say(f"load: {title}"))
    return step_progress(1 + (plan.warmup is not None), "load")


def _report(result: LoadResult, output_json: Path | None) -> None:
    """Metrics for people, the artifact, the line for programs."""
    from prefixwise.bench.files import write_artifact
    from prefixwise.bench.kinds.load import metrics_table
    from prefixwise.bench.render.terminal import terminal_lines

    for line in terminal_lines(metrics_table("", result)):
        say(line)
    for note in result.notes:
        say(f"note: {note}", style="yellow")
    if output_json is not None:
        write_artifact(output_json, result)
    last_line({**result.model_dump(exclude={"server_config"}), "output_json": output_json and str(output_json)})


def _judge(result: LoadResult) -> None:
    """Exit with status 1 where there are no metrics."""
    if not result.measured.answered:
        print_error(f"{result.url} answered no request: {result.measured.errors_by_code}")
        raise typer.Exit(FAILED)
    if result.rate_search and not any(probe.bound_met for probe in result.rate_search):
        print_error(f"no rate met the bound, down to {result.rate_qps:g} requests/s")
        raise typer.Exit(FAILED)
