"""`prefixwise ops smoke` and `prefixwise ops matrix`: one chunk size of the server on a target, or a sweep over all."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.remote.spec import ARTIFACT_ROOT, CHUNK_SIZES, SMOKE_CHUNK_SIZE, SweepSpec
from prefixwise.cli.bench_common import integers, last_line
from prefixwise.cli.engine_options import BackendName, DtypeName
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.ops.options import (
    ArtifactRoot,
    ArtifactSubdir,
    ProjectOption,
    PythonOption,
    TakeOver,
    TargetOption,
    ZoneOption,
    checked_root,
    checked_server_flags,
    open_target,
)
from prefixwise.cli.output import say, visible
from prefixwise.cli.progress import step_progress
from prefixwise.cli.validate.options import ServerFlag
from prefixwise.contract.request import Algorithm
from prefixwise.plan.algorithms import MaskOption

if TYPE_CHECKING:
    from prefixwise.bench.kinds.ops import OpsRow
    from prefixwise.bench.remote.targets.base import Target

_FLAGS = {
    "model": Flag(str, "The model on the target: a folder, a .gguf file, a hub id, or embedded.", "MODEL"),
    "backend": Flag(BackendName, "The server's backend: auto, jax or torch.", "NAME"),
    "dtype": Flag(DtypeName, "The server's dtype: auto, float32, bfloat16 or float16.", "NAME"),
    "algorithm": Flag(Algorithm, "The server's algorithm; only packed has masks.", "NAME"),
    "mask": Flag(
        MaskOption,
        "The server's mask: dense, segment or auto.",
        "NAME",
        name="--multi-item-mask-impl",
        environment_variable="MULTI_ITEM_MASK_IMPL",
    ),
    "segment_fallback_threshold": Flag(
        int, "The server's threshold.", least=0, name="--multi-item-segment-fallback-threshold"
    ),
    "query_tokens": Flag(int, "Tokens of the query.", least=1),
    "num_items": Flag(int, "Items of the request.", least=1),
    "item_tokens": Flag(int, "Tokens of an item.", least=1),
    "warmup_runs": Flag(int, "Untimed runs before the timed ones.", least=0),
    "timed_runs": Flag(int, "Timed runs for each chunk size.", least=1),
    "timeout_sec": Flag(float, "Timeout of one request.", "SECONDS", least=0.001),
    "start_timeout_sec": Flag(float, "Timeout for a server to be ready.", "SECONDS", least=1),
    "port": Flag(int, "The server's port on the target; 0: any free one.", least=0),
    "hardware": Flag(str, "The machine's name in the artifact; default: as the server reports it.", "NAME"),
}

with_sweep_options = with_flags("sweep", SweepSpec, _FLAGS, panel="Sweep")


def chunk_sizes_of(text: str) -> tuple[int, ...]:
    """Raises CommandError."""
    sizes = integers(text, "--chunk-sizes")
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise CommandError(f"--chunk-sizes must be 1 or more, each once, got {text!r}", status=MISUSED)
    return tuple(sizes)


_ALL_SIZES = ",".join(map(str, CHUNK_SIZES))


@with_sweep_options
def smoke(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    chunk_size: Annotated[int, typer.Option(metavar="N", min=1, help="The server's chunk size.")] = SMOKE_CHUNK_SIZE,
    server_flag: ServerFlag = None,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    artifact_subdir: ArtifactSubdir = None,
    take_over: TakeOver = False,
    *,
    sweep: SweepSpec,
) -> None:
    """Test a target with one chunk size: server, requests, one row."""
    spec = replace(sweep, chunk_sizes=(chunk_size,), server_flags=checked_server_flags(server_flag))
    _run(spec, "smoke", open_target(target, project, zone), python, artifact_root, artifact_subdir, take_over=take_over)


@with_sweep_options
def matrix(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    chunk_sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="The server's chunk sizes, one after the other.")
    ] = _ALL_SIZES,
    server_flag: ServerFlag = None,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    artifact_subdir: ArtifactSubdir = None,
    take_over: TakeOver = False,
    *,
    sweep: SweepSpec,
) -> None:
    """Sweep the server's chunk sizes on a target: one server and one row for each, also if it fails."""
    sizes = chunk_sizes_of(chunk_sizes)
    spec = replace(sweep, chunk_sizes=sizes, server_flags=checked_server_flags(server_flag))
    _run(
        spec, "matrix", open_target(target, project, zone), python, artifact_root, artifact_subdir, take_over=take_over
    )


def _run(
    spec: SweepSpec, kind: str, opened: Target, python: str | None, root: str, subdir: str | None, *, take_over: bool
) -> None:
    from prefixwise.bench.remote.agent_client import RemoteAgent
    from prefixwise.bench.remote.folders import check_name, new_name
    from prefixwise.bench.remote.sweep import Watcher, run_sweep

    checked_root(root)
    name = check_name(subdir or new_name(f"{spec.mask}-{kind}"))
    spec = replace(spec, folder=f"{root.rstrip('/')}/{name}", new_folder=not subdir)
    say(f"target {opened.name}: {spec.to_line()}")
    opened.check_reachable()
    begun: list[str] = []  # the folder, which the target may have renamed
    with _resume_hint_on_failure(begun), step_progress(len(spec.chunk_sizes), f"ops {kind}") as step:
        watcher = Watcher(step, lambda line: say(f"  {visible(line)}"), begun.append)
        result = run_sweep(RemoteAgent.on(opened, python), spec, watcher, take_over=take_over)
    _print_rows(result.rows)
    name = _name_of(result.folder)
    say(f"artifacts on {opened.name}: {result.folder}")
    if opened.name != "local":
        say(f"fetch them with: {_collect_command(name, opened.name, python, root)}")
    last_line({"target": opened.name, "name": name, "folder": result.folder, **_summary(result.rows)})
    if not result.succeeded:
        raise typer.Exit(FAILED)


@contextmanager
def _resume_hint_on_failure(begun: Sequence[str]) -> Iterator[None]:
    """Print how to resume if the sweep fails (Ctrl-C, a lost connection); only the current row is lost."""
    try:
        yield
    except BaseException:
        for folder in begun:
            say(f"completed rows are in {folder}")
            say(f"to resume: the same command with --artifact-subdir {_name_of(folder)}")
        raise


def _name_of(folder: str) -> str:
    return folder.rpartition("/")[2]


def _collect_command(name: str, target: str, python: str | None, root: str) -> str:
    command = ["prefixwise", "ops", "collect", name, "--target", target]
    command += [] if python is None else ["--python", python]
    return shlex.join([*command, *([] if root == ARTIFACT_ROOT else ["--artifact-root", root])])


def _summary(rows: Sequence[OpsRow]) -> dict[str, object]:
    best = max((row for row in rows if row.throughput_items_per_sec), key=_throughput, default=None)
    return {
        "best_chunk_size": None if best is None else best.chunk_size,
        "best_throughput": None if best is None else best.throughput_items_per_sec,
        "rows": [row.model_dump(exclude={"latencies_ms"}) for row in rows],
    }


def _throughput(row: OpsRow) -> float:
    return row.throughput_items_per_sec or 0.0


def _print_rows(rows: Sequence[OpsRow]) -> None:
    from prefixwise.bench.kinds.ops import ops_rows_table
    from prefixwise.bench.render.terminal import terminal_lines

    for line in terminal_lines(ops_rows_table("", rows, with_errors=False)):
        say(line)
    for row in rows:
        if row.error:
            say(f"chunk size {row.chunk_size}: {visible(row.error)}", style="red")
