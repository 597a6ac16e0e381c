"""`prefixwise validate self`: the whole harness on servers of its own, with a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.bench_common import integers, last_line
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.output import Column, render_table, say, stdout_width
from prefixwise.cli.progress import step_progress
from prefixwise.cli.validate.options import ServerFlag, split_server_flags

if TYPE_CHECKING:
    from prefixwise.bench.kinds.self_check import SelfCheck, SelfCheckStep


def validate_self(
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where artifacts, logs and the report go.")],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A folder, a .gguf file, a hub id, or embedded.")
    ] = "embedded",
    backends: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="jax, torch, or both.")] = "jax,torch",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the servers.")] = "float32",
    query_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the query.")] = 128,
    num_items: Annotated[int, typer.Option(metavar="N", min=1, help="Items of a request.")] = 32,
    item_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of an item.")] = 8,
    client_chunk_sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Of the matrices.")] = "1,8,32",
    timed_runs: Annotated[int, typer.Option(metavar="N", min=1, help="Of everything that is timed.")] = 3,
    min_speedup: Annotated[
        float, typer.Option(metavar="X", min=0, help="Of 32 items in one request over one by one.")
    ] = 3.0,
    server_flag: ServerFlag = None,
) -> None:
    """Validate this installation: start servers, run everything on a small workload, judge it, write a report."""
    chosen = tuple(name.strip() for name in backends.split(",") if name.strip())
    if not chosen or not set(chosen) <= {"jax", "torch"}:
        raise CommandError(f"--backends must be jax, torch or both, got {backends!r}", status=MISUSED)
    sizes = integers(client_chunk_sizes, "--client-chunk-sizes")
    from prefixwise.bench.options import SelfCheckOptions
    from prefixwise.bench.run.self_check import SelfCheckRun, num_steps

    options = SelfCheckOptions(
        output_dir=output_dir,
        model=model,
        backends=chosen,
        dtype=dtype,
        query_tokens=query_tokens,
        num_items=num_items,
        item_tokens=item_tokens,
        client_chunk_sizes=tuple(sizes),
        timed_runs=timed_runs,
        min_speedup=min_speedup,
        server_flags=split_server_flags(server_flag),
    )
    try:
        with step_progress(num_steps(options), "validate self") as on_step:
            verdict = SelfCheckRun(options, on_step)()
    except BaseException:
        say(f"cut short: {output_dir / 'self_check.json'} has the steps that were done")
        raise
    _report_findings(verdict)
    last_line({"all_pass": verdict.all_pass, "output_dir": str(output_dir), "steps": len(verdict.steps)})
    if not verdict.all_pass:
        raise typer.Exit(FAILED)


def _report_findings(verdict: SelfCheck) -> None:
    from prefixwise.bench.run.self_check import SKIPPED

    steps = verdict.steps
    columns = [
        Column("step", [step.title for step in steps]),
        Column("result", [_result(step) for step in steps]),
        Column("seconds", [f"{step.seconds:.1f}" for step in steps]),
    ]
    for line in render_table(columns, stdout_width()).splitlines():
        say(line)
    for step in steps:
        if step.status != 0:
            say(f"{step.title}: {step.detail}", style="red")
            if step.status != SKIPPED:
                say(f"  again: {step.command}")
            if step.status != SKIPPED and step.server is not None:
                say(f"  server: {step.server}")
    say("all pass" if verdict.all_pass else "not all pass", style="bold")


def _result(step: SelfCheckStep) -> str:
    from prefixwise.bench.run.self_check import SKIPPED

    if step.status == 0:
        return "pass"
    return "not run" if step.status == SKIPPED else f"FAIL ({step.status})"
