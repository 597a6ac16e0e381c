"""`prefixwise ops compare-backends`: JAX against PyTorch, each on its own target, from the workload to the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.remote.compare.plan import ComparePlan
from prefixwise.bench.remote.resources import ResourceOptions
from prefixwise.bench.remote.spec import ARTIFACT_ROOT
from prefixwise.cli.failures import FAILED
from prefixwise.cli.harness_common import last_line
from prefixwise.cli.ops import compare_options as options
from prefixwise.cli.ops.checks import checked_dtype, checked_root, checked_server_flags
from prefixwise.cli.ops.compare_machines import Machines, with_machine_options
from prefixwise.cli.ops.options import ArtifactSubdir, TakeOver, open_target
from prefixwise.cli.output import say
from prefixwise.cli.text_table import visible
from prefixwise.cli.validate.options import ServerFlag

if TYPE_CHECKING:
    from prefixwise.bench.artifacts import BackendName
    from prefixwise.bench.remote.compare.preflight import CompareSide
    from prefixwise.bench.remote.compare.run import CompareResult, CompareRun
    from prefixwise.bench.remote.sweep import Watcher

_Python = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="The interpreter there that has prefixwise; as `ops install` left it."),
]


@with_machine_options
@options.with_compare_options
def compare_backends(
    jax_target: options.JaxTarget = None,
    pytorch_target: options.PytorchTarget = None,
    jax_python: _Python = None,
    pytorch_python: _Python = None,
    client_chunk_sizes: options.ClientChunkSizes = None,
    label_token_ids: options.LabelTokenIds = None,
    server_flag: ServerFlag = None,
    jax_server_flag: options.JaxServerFlag = None,
    pytorch_server_flag: options.PytorchServerFlag = None,
    require_accelerator: options.RequireAccelerator = None,
    require_jax_accelerator: options.RequireJaxAccelerator = None,
    artifact_root: options.ArtifactRoot = ARTIFACT_ROOT,
    artifact_subdir: ArtifactSubdir = None,
    create_resources: options.CreateResources = False,
    teardown: options.Teardown = False,
    take_over: TakeOver = False,
    *,
    plan: ComparePlan,
    machines: ResourceOptions,
) -> None:
    """Compare JAX with PyTorch, each on its own target: workload, four matrices, comparison, report.

    What is there already is kept: the same command goes on where it was cut short, and does nothing where all is done.
    The status is 1 where scores do not agree, or a matrix has no row that worked.
    """
    checked_root(artifact_root)
    checked_dtype(plan.dtype)
    plan = replace(
        plan,
        client_chunk_sizes=options.chunk_sizes(client_chunk_sizes),
        label_token_ids=options.labels(label_token_ids),
        server_flags=checked_server_flags(server_flag),
        jax_server_flags=checked_server_flags(jax_server_flag),
        pytorch_server_flags=checked_server_flags(pytorch_server_flag),
    )
    sides = {
        **_side("jax", options.target_of(jax_target, "gcloud-tpu", "TPU_NAME"), jax_python, require_jax_accelerator),
        **_side(
            "pytorch", options.target_of(pytorch_target, "gcloud-gpu", "GPU_NAME"), pytorch_python, require_accelerator
        ),
    }
    own = Machines([side.agent.target for side in sides.values()], machines, create=create_resources, delete=teardown)
    run = _run_of(plan, sides, artifact_root, artifact_subdir, take_over=take_over)
    with own.told_after_failure(), _no_empty_folder(run.folder):
        missing = {step.backend for step in run.begin()}
        own.make([side for side in sides.values() if side.backend in missing])
        result = run()
        _tell(result)
        if not result.passed:
            raise typer.Exit(FAILED)
    own.remove(run.used_targets)


def _side(
    backend: BackendName, target: str, python: str | None, accelerator: str | None
) -> dict[BackendName, CompareSide]:
    from prefixwise.bench.remote.compare.preflight import CompareSide
    from prefixwise.bench.remote.remote_agent import RemoteAgent

    return {backend: CompareSide(backend, RemoteAgent.on(open_target(target), python), accelerator)}


def _run_of(
    plan: ComparePlan, sides: dict[BackendName, CompareSide], root: str, subdir: str | None, *, take_over: bool
) -> CompareRun:
    from prefixwise.bench.remote.compare.run import CompareRun
    from prefixwise.bench.remote.folders import check_name, make_new, new_name

    here = Path(root).expanduser() / check_name(subdir or new_name("jax-vs-pytorch-multi-item"))
    if not subdir:
        here = make_new(here)
    name, there = here.name, f"{root.rstrip('/')}/{here.name}"
    say(f"{name}: {', '.join(f'{backend} on {side.agent.target.name}' for backend, side in sides.items())}")
    say(f"artifacts: {here}")
    if not subdir:
        say(f"to go on after a failure, or to do it again: the same command with --artifact-subdir {name}")
    return CompareRun(plan, sides, here, there, _watcher(), take_over)


@contextmanager
def _no_empty_folder(folder: Path) -> Iterator[None]:
    """Is left by a run that could not begin."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # there is something in it, or it was never made
            folder.rmdir()
        raise


def _watcher() -> Watcher:
    from prefixwise.bench.remote.compare.run import NUM_STEPS
    from prefixwise.bench.remote.sweep import Watcher

    number = count(1)
    return Watcher(lambda title: say(f"[{next(number)}/{NUM_STEPS}] {title}"), lambda line: say(f"  {visible(line)}"))


def _tell(result: CompareResult) -> None:
    """For people, then for programs."""
    from prefixwise.bench.remote.compare.files import COMPARISON, REPORT_HTML, REPORT_MARKDOWN

    comparison = result.comparison
    for view, words in comparison.recommendations.items():
        say(f"{view}: {words}")
    if result.failed:
        say(f"no chunk size worked: {', '.join(result.failed)}", style="red")
    if not comparison.correctness["pass"]:
        say("the correctness gate failed", style="red")
    files = {"comparison_json": COMPARISON, "report": REPORT_MARKDOWN, "report_html": REPORT_HTML}
    last_line(
        {
            "folder": str(result.folder),
            **{name: str(result.folder / file) for name, file in files.items()},
            "pass": comparison.correctness["pass"],
            "portable_winner": comparison.portable_view.winner["backend"],
            "best_native_winner": comparison.best_native_view.winner["backend"],
            "matrices_failed": list(result.failed),
            "kept": list(result.kept),
        }
    )
