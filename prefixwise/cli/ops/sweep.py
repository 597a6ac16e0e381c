"""`prefixwise ops smoke` and `prefixwise ops matrix`: the server's chunk sizes on a target, one or all of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.remote.spec import ARTIFACT_ROOT, CHUNK_SIZES, SMOKE_CHUNK_SIZE, SweepSpec
from prefixwise.cli.failures import FAILED
from prefixwise.cli.harness_common import last_line, step_progress
from prefixwise.cli.ops.checks import checked_root, checked_server_flags
from prefixwise.cli.ops.options import (
    ArtifactRoot,
    ArtifactSubdir,
    ProjectOption,
    PythonOption,
    TakeOver,
    TargetOption,
    ZoneOption,
    open_target,
)
from prefixwise.cli.ops.sweep_options import chunk_sizes_of, with_sweep_options
from prefixwise.cli.output import say, stdout_width
from prefixwise.cli.text_table import Column, render_table, visible
from prefixwise.cli.validate.options import ServerFlag

if TYPE_CHECKING:
    from prefixwise.bench.artifacts import OpsRow
    from prefixwise.bench.remote.targets.base import Target

_ALL_SIZES = ",".join(map(str, CHUNK_SIZES))


@with_sweep_options
def smoke(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    chunk_size: Annotated[int, typer.Option(metavar="N", min=1, help="Of the server.")] = SMOKE_CHUNK_SIZE,
    server_flag: ServerFlag = None,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    artifact_subdir: ArtifactSubdir = None,
    take_over: TakeOver = False,
    *,
    sweep: SweepSpec,
) -> None:
    """Try a target with one chunk size: server, requests, one row."""
    spec = replace(sweep, chunk_sizes=(chunk_size,), server_flags=checked_server_flags(server_flag))
    _run(spec, "smoke", open_target(target, project, zone), python, artifact_root, artifact_subdir, take_over=take_over)


@with_sweep_options
def matrix(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    chunk_sizes: Annotated[str, typer.Option(metavar="LIST", help="Of the server, one after the other.")] = _ALL_SIZES,
    server_flag: ServerFlag = None,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    artifact_subdir: ArtifactSubdir = None,
    take_over: TakeOver = False,
    *,
    sweep: SweepSpec,
) -> None:
    """Sweep the server's chunk sizes on a target: a server for each, one row for each, whatever becomes of it."""
    sizes = chunk_sizes_of(chunk_sizes)
    spec = replace(sweep, chunk_sizes=sizes, server_flags=checked_server_flags(server_flag))
    _run(
        spec, "matrix", open_target(target, project, zone), python, artifact_root, artifact_subdir, take_over=take_over
    )


def _run(
    spec: SweepSpec, kind: str, opened: Target, python: str | None, root: str, subdir: str | None, *, take_over: bool
) -> None:
    from prefixwise.bench.remote.folders import check_name, new_name
    from prefixwise.bench.remote.remote_agent import RemoteAgent
    from prefixwise.bench.remote.sweep import Watcher, run_sweep

    checked_root(root)
    name = check_name(subdir or new_name(f"{spec.mask}-{kind}"))
    spec = replace(spec, folder=f"{root.rstrip('/')}/{name}", new_folder=not subdir)
    say(f"target {opened.name}: {spec.to_line()}")
    opened.check_reachable()
    begun: list[str] = []  # the folder, which the target may have named otherwise
    with _told_how_to_go_on(begun), step_progress(len(spec.chunk_sizes), f"ops {kind}") as step:
        watcher = Watcher(step, lambda line: say(f"  {visible(line)}"), begun.append)
        result = run_sweep(RemoteAgent.on(opened, python), spec, watcher, take_over=take_over)
    _tell(result.rows)
    name = _name_of(result.folder)
    say(f"artifacts on {opened.name}: {result.folder}")
    if opened.name != "local":
        say(f"fetch them with: {_collect_command(name, opened.name, python, root)}")
    last_line({"target": opened.name, "name": name, "folder": result.folder, **_summary(result.rows)})
    if not result.succeeded:
        raise typer.Exit(FAILED)


@contextmanager
def _told_how_to_go_on(begun: Sequence[str]) -> Iterator[None]:
    """What ends a sweep (Ctrl-C, a connection) loses the row that is being measured, and no other."""
    try:
        yield
    except BaseException:
        for folder in begun:
            say(f"the rows that are done stay in {folder}")
            say(f"to go on: the same command with --artifact-subdir {_name_of(folder)}")
        raise


def _name_of(folder: str) -> str:
    return folder.rpartition("/")[2]


def _collect_command(name: str, target: str, python: str | None, root: str) -> str:
    words = ["prefixwise", "ops", "collect", name, "--target", target]
    words += [] if python is None else ["--python", python]
    return shlex.join([*words, *([] if root == ARTIFACT_ROOT else ["--artifact-root", root])])


def _summary(rows: Sequence[OpsRow]) -> dict[str, object]:
    best = max((row for row in rows if row.throughput_items_per_sec), key=_throughput, default=None)
    return {
        "best_chunk_size": None if best is None else best.chunk_size,
        "best_throughput": None if best is None else best.throughput_items_per_sec,
        "rows": [row.model_dump(exclude={"latencies_ms"}) for row in rows],
    }


def _throughput(row: OpsRow) -> float:
    return row.throughput_items_per_sec or 0.0


def _tell(rows: Sequence[OpsRow]) -> None:
    def cells(values: Sequence[float | None], digits: int) -> list[str]:
        return ["" if value is None else f"{value:,.{digits}f}" for value in values]

    columns = [
        Column("chunk size", [str(row.chunk_size) for row in rows], align_right=True),
        Column("items/s", cells([row.throughput_items_per_sec for row in rows], 1), align_right=True),
        Column("p50 ms", cells([row.latency_p50_ms for row in rows], 1), align_right=True),
        Column("p99 ms", cells([row.latency_p99_ms for row in rows], 1), align_right=True),
        Column("peak MB", cells([row.memory_peak_mb for row in rows], 0), align_right=True),
        Column("status", [row.status for row in rows]),
    ]
    for line in render_table(columns, stdout_width()).splitlines():
        say(line)
    for row in rows:
        if row.error:
            say(f"chunk size {row.chunk_size}: {visible(row.error)}", style="red")
