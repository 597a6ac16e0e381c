"""`prefixwise bench ab`: variants on this machine against each other, with servers of its own."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixwise.cli.bench import geometry_options as shape_option
from prefixwise.cli.bench_common import ApiKey, OutputMarkdown, Timeout, last_line, print_server_info
from prefixwise.cli.engine_options import DtypeName
from prefixwise.cli.failures import FAILED, MISUSED, CommandError, print_error
from prefixwise.cli.flags import finite
from prefixwise.cli.output import say
from prefixwise.cli.progress import step_progress

if TYPE_CHECKING:
    from prefixwise.bench.geometry import Preset, RequestMaker
    from prefixwise.bench.kinds.ab import AbResult
    from prefixwise.bench.run.ab import AbPlan, ServerSetup, Variant

CompareName = Literal["mask", "algorithm", "backend", "chunk-size"]
AlgorithmName = Literal["auto", "packed", "prefill_extend", "serial"]
MaskName = Literal["auto", "dense", "segment"]

Model = Annotated[
    str | None, typer.Option(metavar="MODEL", help="A folder, a .gguf file or a hub id; the embedded model.")
]
Compare = Annotated[
    CompareName, typer.Option("--compare", metavar="NAME", help="mask, algorithm, backend or chunk-size.")
]
Variants = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Which of them, the baseline first: packed,serial, or chunk sizes: 8,32,0; all."),
]
Algorithm = Annotated[
    AlgorithmName | None,
    typer.Option(metavar="NAME", help="Of every request, where it is not compared; packed for masks, else auto."),
]
Mask = Annotated[
    MaskName,
    typer.Option(
        "--mask",
        "--multi-item-mask-impl",
        envvar="MULTI_ITEM_MASK_IMPL",
        metavar="NAME",
        help="Of every server: auto, dense or segment; where masks are compared, the baseline.",
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        "--timed-runs",
        envvar="MULTI_ITEM_BENCH_TIMED_RUNS",
        metavar="N",
        min=1,
        help="In each every variant runs, in another order.",
    ),
]
RunsPerRound = Annotated[int, typer.Option(metavar="N", min=1, help="Of each variant; a round counts their median.")]
WarmupRuns = Annotated[
    int,
    typer.Option(envvar="MULTI_ITEM_BENCH_WARMUP_RUNS", metavar="N", min=0, help="Of each variant, before the rounds."),
]
Cached = Annotated[
    bool, typer.Option("--cached/--cold", help="One query with a cached prefix, or another query in every run.")
]
Dtype = Annotated[
    DtypeName, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16; of backends auto is float32.")
]
ServerArgs = Annotated[
    str, typer.Option(metavar="FLAGS", help='More flags for every server: "--device cuda --warmup fast".')
]
MaxAbs = Annotated[
    float,
    typer.Option("--correctness-threshold-max-abs", metavar="X", min=0, callback=finite, help="Of score differences."),
]
MeanAbs = Annotated[
    float,
    typer.Option("--correctness-threshold-mean-abs", metavar="X", min=0, callback=finite, help="Of score differences."),
]
Output = Annotated[Path | None, typer.Option("--output-json", metavar="FILE", help="Where the artifact goes.")]
LogDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the servers' logs stay; nowhere when left out.")
]


def bench_ab(
    compare: Compare,
    model: Model = None,
    variants: Variants = None,
    algorithm: Algorithm = None,
    mask: Mask = "auto",
    geometry: shape_option.GeometryPreset = "contract",
    query_tokens: shape_option.QueryTokens = None,
    num_items: shape_option.NumItems = None,
    item_tokens: shape_option.ItemTokens = None,
    label_token_ids: shape_option.LabelTokenIds = None,
    rounds: Rounds = 10,
    runs_per_round: RunsPerRound = 3,
    warmup_runs: WarmupRuns = 1,
    cached: Cached = True,
    dtype: Dtype = "auto",
    server_args: ServerArgs = "",
    max_abs: MaxAbs = 0.02,
    mean_abs: MeanAbs = 0.01,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of tokens and of the order in a round.")] = 0,
    timeout_sec: Timeout = 600.0,
    api_key: ApiKey = None,
    log_dir: LogDir = None,
    output_json: Output = None,
    output_markdown: OutputMarkdown = None,
) -> None:
    """Compare variants on this machine: starts their servers, runs them in turns, and says how sure the ratios are.

    Exits with 1 where a variant fails, or its scores are not the baseline's: a wrong answer is never faster.
    """
    chosen = _choose(compare, variants, algorithm, mask)
    shape = shape_option.shape_of(geometry, query_tokens, num_items, item_tokens)
    from prefixwise.bench.run.ab import AbPlan, ServerSetup

    setup = ServerSetup(_server_flags(model, _one_dtype(compare, dtype), server_args), timeout_sec, api_key)
    plan = AbPlan(compare, model, rounds, runs_per_round, warmup_runs, cached, seed, max_abs, mean_abs)
    done = _measure(plan, chosen, setup, log_dir, _maker_of(shape, label_token_ids, seed))
    _conclude(done, output_json, output_markdown)


@dataclass(frozen=True)
class _Done:
    """All rounds, or those that were finished when it was interrupted."""

    result: AbResult
    interrupt: BaseException | None = None


def _maker_of(shape: Preset, labels: str | None, seed: int) -> Callable[[Mapping[str, Any]], RequestMaker]:
    """Requests for a server that reports its vocabulary."""
    return lambda info: shape_option.make_requests(
        shape, info, labels=labels, vocab_size=None, distinct_queries=0, seed=seed
    )


def _measure(
    plan: AbPlan,
    variants: Sequence[Variant],
    setup: ServerSetup,
    log_dir: Path | None,
    maker_for: Callable[[Mapping[str, Any]], RequestMaker],
) -> _Done:
    from prefixwise.bench.run.ab import AbMeasurement, start_variants

    with ExitStack() as stack:
        logs = log_dir or Path(stack.enter_context(TemporaryDirectory(prefix="prefixwise-ab-")))
        running = start_variants(stack, variants, setup, logs, lambda line: say(f"ab: {line}"))
        for client in {id(each.client): each.client for each in running}.values():
            print_server_info(client)
        measurement = AbMeasurement(running, maker_for(running[0].server_config), plan)
        try:
            with step_progress(1 + plan.rounds, "ab") as step:
                measurement.run(step)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            if not measurement.finished_rounds:
                raise
            return _Done(measurement.result(), interrupt)
        return _Done(measurement.result())


def _choose(
    compare: CompareName, variants: str | None, algorithm: AlgorithmName | None, mask: MaskName
) -> list[Variant]:
    from prefixwise.bench.run.ab import ComparisonError, variants_of

    if compare == "algorithm" and algorithm is not None:
        raise CommandError("--algorithm is what is compared: choose with --variants", status=MISUSED)
    names = None if variants is None else [name.strip() for name in variants.split(",")]
    usual = "packed" if compare == "mask" else "auto"  # only packed rows have masks
    try:
        return variants_of(compare, names, algorithm=algorithm or usual, mask=mask)
    except ComparisonError as error:
        raise CommandError(str(error), status=MISUSED) from None


def _one_dtype(compare: CompareName, dtype: DtypeName) -> DtypeName:
    """Left to themselves backends choose differently on a CPU, and their scores would differ by rounding alone."""
    if compare != "backend" or dtype != "auto":
        return dtype
    say("ab: both backends in float32 (--dtype chooses another)")
    return "float32"


def _server_flags(model: str | None, dtype: DtypeName, more: str) -> list[str]:
    try:
        given = shlex.split(more)
    except ValueError as error:
        raise CommandError(f"--server-args must be flags as in a shell: {error}", status=MISUSED) from None
    return [*(() if model is None else ("--model-path", model)), "--dtype", dtype, *given]


def _conclude(done: _Done, output_json: Path | None, output_markdown: Path | None) -> None:
    """Report the finished rounds before an interrupt ends the program."""
    _report(done.result, output_json, output_markdown)
    if done.interrupt is not None:
        raise done.interrupt
    _judge(done.result)


def _report(result: AbResult, output_json: Path | None, output_markdown: Path | None) -> None:
    """A table for people, the artifact, the line for programs."""
    from prefixwise.bench.files import write_artifact, write_text
    from prefixwise.bench.kinds.ab import variants_table
    from prefixwise.bench.render.markdown import report_markdown
    from prefixwise.bench.render.terminal import terminal_lines
    from prefixwise.bench.run.report import report_of

    for line in terminal_lines(variants_table(result)):
        say(line)
    for note in result.notes:
        say(f"note: {note}", style="yellow")
    if output_json is not None:
        write_artifact(output_json, result)
    if output_markdown is not None:
        write_text(output_markdown, report_markdown(report_of(result, output_markdown.name)))
    variants = [variant.model_dump(exclude={"server_config", "runs"}) for variant in result.variants]
    paths = {"output_json": output_json, "output_markdown": output_markdown}
    written = {name: None if path is None else str(path) for name, path in paths.items()}
    last_line({**result.model_dump(exclude={"variants"}), "variants": variants, **written})


def _judge(result: AbResult) -> None:
    """Exit with status 1 where a variant failed or its scores differ."""
    from prefixwise.bench.kinds.ab import problems_of

    for problem in (problems := problems_of(result)):
        print_error(problem)
    if problems:
        raise typer.Exit(FAILED)
