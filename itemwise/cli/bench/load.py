"""`itemwise bench load`: how a server does under load, open loop or closed loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from itemwise.cli.bench import geometry_options as shape_option
from itemwise.cli.failures import FAILED, MISUSED, CommandError, tell_error
from itemwise.cli.harness_common import ApiKey, Timeout, last_line, step_progress, tell_server
from itemwise.cli.output import say

if TYPE_CHECKING:
    from itemwise.harness.artifacts import LoadResult
    from itemwise.harness.geometry import RequestMaker
    from itemwise.harness.load.arrivals import PhaseLength
    from itemwise.harness.load.driver import LoadTarget
    from itemwise.harness.load.run import LoadPlan

Mode = Literal["open", "closed"]

BaseUrl = Annotated[str, typer.Option(metavar="URL", help="The server, with or without /v1/score.")]
ModeOption = Annotated[
    Mode,
    typer.Option(
        "--mode", metavar="NAME", help="open (requests come when they come) or closed (each waits for an answer)."
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(metavar="QPS", min=0.001, help="Open loop: mean rate of the Poisson arrivals; the geometry's."),
]
Concurrency = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Closed loop: requests in flight; 1 when left out.")
]
DistinctQueries = Annotated[
    int, typer.Option(metavar="N", min=0, help="Queries that requests take turns with; 0: each has its own.")
]
Duration = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0.001, help="How long requests are sent; 30 when left out.")
]
NumRequests = Annotated[int | None, typer.Option(metavar="N", min=1, help="How many are sent, where that comes first.")]
WarmupSec = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0.0, help="Sent before, and in no figure; 0: none.")
]
WarmupRequests = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="The same by number; 10 when both are left out.")
]
P99Bound = Annotated[
    float | None, typer.Option(metavar="MS", min=0.001, help="Report the goodput: what is answered within it.")
]
FindRate = Annotated[
    bool,
    typer.Option("--find-rate", metavar="", help="Search the highest rate that meets --p99-bound-ms, from --rate on."),
]
MaxInFlight = Annotated[
    int, typer.Option(metavar="N", min=1, help="Open loop: arrivals that would be more are dropped and counted.")
]
Output = Annotated[Path | None, typer.Option("--output-json", metavar="FILE", help="Where the artifact goes.")]


def bench_load(
    base_url: BaseUrl = "http://127.0.0.1:30000",
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
    max_in_flight: MaxInFlight = 512,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of arrivals and tokens.")] = 0,
    timeout_sec: Timeout = 180.0,
    api_key: ApiKey = None,
    output_json: Output = None,
) -> None:
    """Drive a server with requests: rates, latency percentiles, errors by code, goodput.

    Latency counts from when a request was meant to be sent, so a server that stalls cannot hide it. With the same
    seed a server that keeps prefixes has seen the queries of an earlier run: give another one.
    """
    shape = shape_option.shape_of(geometry, query_tokens, num_items, item_tokens)
    rate = rate or (shape.rate_qps if mode == "open" else None)
    _check(mode, rate, concurrency, p99_bound_ms, find_rate)
    from itemwise.harness.client import ScoreClient
    from itemwise.harness.load.arrivals import PhaseLength
    from itemwise.harness.load.driver import LoadTarget
    from itemwise.harness.load.run import LoadPlan

    plan = LoadPlan(
        mode=mode,
        length=PhaseLength(30.0 if duration_sec is None and num_requests is None else duration_sec, num_requests),
        warmup=_warmup(warmup_sec, warmup_requests),
        rate_qps=rate,
        concurrency=(concurrency or 1) if mode == "closed" else None,
        bound_ms=p99_bound_ms,
        search=find_rate,
        seed=seed,
    )
    with ScoreClient(base_url, timeout_sec=timeout_sec, api_key=api_key) as client:
        info, address = tell_server(client), client.base_url
    maker = shape_option.make_requests(
        shape, info, labels=label_token_ids, vocab_size=vocab_size, distinct_queries=distinct_queries, seed=seed
    )
    result = _run(LoadTarget(address, timeout_sec, max_in_flight, api_key), maker, plan, info)
    _report(result, output_json)


def _check(
    mode: Mode, rate: float | None, concurrency: int | None, p99_bound_ms: float | None, find_rate: bool
) -> None:
    """Options that do not go together would measure something else than was meant."""
    if mode == "open" and rate is None:
        raise CommandError("--mode open needs --rate", hint="--geometry small has one: 120", status=MISUSED)
    if mode == "open" and concurrency is not None:
        raise CommandError("--concurrency is for --mode closed, got it with --mode open", status=MISUSED)
    if mode == "closed" and (rate is not None or find_rate):
        raise CommandError("--rate and --find-rate are for --mode open, got one with --mode closed", status=MISUSED)
    if find_rate and p99_bound_ms is None:
        raise CommandError("--find-rate needs --p99-bound-ms", status=MISUSED)


def _warmup(seconds: float | None, requests: int | None) -> PhaseLength | None:
    from itemwise.harness.load.arrivals import PhaseLength

    if seconds is None and requests is None:
        return PhaseLength(requests=10)
    return None if 0 in (seconds, requests) else PhaseLength(seconds, requests)


def _run(target: LoadTarget, maker: RequestMaker, plan: LoadPlan, info: dict[str, Any]) -> LoadResult:
    from itemwise.harness.load.run import LoadRun

    if plan.search:  # nobody knows how many phases there will be
        return LoadRun(target, maker, plan, lambda title: say(f"load: {title}")).run(info)
    with step_progress(1 + (plan.warmup is not None), "load") as step:
        return LoadRun(target, maker, plan, step).run(info)


def _report(result: LoadResult, output_json: Path | None) -> None:
    """Figures for people, the artifact, the line for programs. Exits with a status where there are no figures."""
    from itemwise.harness.files import write_artifact
    from itemwise.harness.load.stats import figures_of

    for name, value in figures_of(result):
        say(f"{name:<16} {value}")
    for note in result.notes:
        say(f"note: {note}", style="yellow")
    if output_json is not None:
        write_artifact(output_json, result)
    last_line({**result.model_dump(exclude={"server_config"}), "output_json": output_json and str(output_json)})
    if not result.measured.answered:
        tell_error(f"{result.url} answered no request: {result.measured.errors_by_code}")
        raise typer.Exit(FAILED)
    if result.rate_search and not any(probe.bound_met for probe in result.rate_search):
        tell_error(f"no rate met the bound, down to {result.rate_qps:g} requests/s")
        raise typer.Exit(FAILED)
