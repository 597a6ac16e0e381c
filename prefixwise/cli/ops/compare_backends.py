"""`prefixwise ops compare-backends`: JAX against PyTorch, each on its own target, from the workload to the report."""

from __future__ import annotations

import os
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
from prefixwise.cli.bench_common import integers, last_line
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.ops.machines import Machines, with_machine_options
from prefixwise.cli.ops.options import (
    ArtifactSubdir,
    TakeOver,
    checked_dtype,
    checked_root,
    checked_server_flags,
    open_target,
)
from prefixwise.cli.output import say, visible
from prefixwise.cli.validate.options import ServerFlag

if TYPE_CHECKING:
    from prefixwise.bench.kinds.base import BackendName
    from prefixwise.bench.remote.compare.run import CompareResult, CompareRun, CompareSide
    from prefixwise.bench.remote.sweep import Watcher

_PLAN_FLAGS = {
    "model": Flag(str, "The model on both targets: a folder, a .gguf file, a hub id, or embedded.", "MODEL"),
    "dtype": Flag(str, "The dtype of all servers: auto, float32, bfloat16 or float16.", "NAME"),
    "query_tokens": Flag(int, "Tokens of the query.", least=1),
    "num_items": Flag(int, "Items of the request.", least=1),
    "item_tokens": Flag(int, "Tokens of an item.", least=1),
    "delimiter_token_id": Flag(
        int | None, "The token between items; default: 151643 if the model has it.", "ID", least=0
    ),
    "warmup_runs": Flag(int, "Untimed runs before each chunk size.", least=0),
    "timed_runs": Flag(int, "Timed runs of each chunk size.", least=1),
    "timed_runs_confirm": Flag(
        int, "Timed runs that confirm the best chunk sizes and their neighbours; 0: none.", least=0
    ),
    "timeout_sec": Flag(float, "Timeout of one call.", "SECONDS", least=0.001),
    "jax_server_chunk_size": Flag(int, "Chunk size of JAX's server in the best-native view.", least=1),
    "correctness_threshold_max_abs": Flag(
        float, "Maximum absolute difference of a score from PyTorch's.", "X", least=0
    ),
    "correctness_threshold_mean_abs": Flag(float, "Maximum mean absolute difference.", "X", least=0),
    "start_timeout_sec": Flag(float, "Timeout for a server to be ready.", "SECONDS", least=1),
}

with_compare_options = with_flags("plan", ComparePlan, _PLAN_FLAGS, panel="Measurement")

ClientChunkSizes = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...", help="Items in one call; default: 1,2,4,8,16,32,64,128,256,500 up to the number of items."
    ),
]
LabelTokenIds = Annotated[
    str | None,
    typer.Option(metavar="ID,ID,...", help="The label tokens; default: 9454,2753 if the model has them."),
]
JaxServerFlag = Annotated[list[str] | None, typer.Option(metavar="FLAG", help="For JAX's servers only.")]
PytorchServerFlag = Annotated[list[str] | None, typer.Option(metavar="FLAG", help="For PyTorch's servers only.")]
JaxTarget = Annotated[
    str | None,
    typer.Option(metavar="TARGET", help="JAX's target; default: gcloud-tpu://$TPU_NAME if set, else local."),
]
PytorchTarget = Annotated[
    str | None,
    typer.Option(metavar="TARGET", help="PyTorch's target; default: gcloud-gpu://$GPU_NAME if set, else local."),
]
RequireAccelerator = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Required accelerator of PyTorch's target, by a part of its name: 'RTX PRO 6000' (G4).",
    ),
]
RequireJaxAccelerator = Annotated[
    str | None, typer.Option(metavar="NAME", help="Required accelerator of JAX's target: 'TPU v6'.")
]
ArtifactRoot = Annotated[
    str, typer.Option("--artifact-root", metavar="DIR", help="The folder of all runs, here and on the targets.")
]
CreateResources = Annotated[
    bool,
    typer.Option("--create-resources", envvar="CREATE_RESOURCES", metavar="", help="Create missing gcloud targets."),
]
Teardown = Annotated[
    bool,
    typer.Option(
        "--teardown", envvar="TEARDOWN_AT_END", metavar="", help="Delete the gcloud targets after a successful run."
    ),
]


def target_of(given: str | None, scheme: str, variable: str) -> str:
    """The given target, or the one that the environment names, or local."""
    name = os.environ.get(variable)
    return given or (f"{scheme}://{name}" if name else "local")


def chunk_sizes(text: str | None) -> tuple[int, ...]:
    """Empty: the default sizes. Raises CommandError."""
    sizes = () if text is None else tuple(dict.fromkeys(integers(text, "--client-chunk-sizes")))
    if sizes and min(sizes) < 1:
        raise CommandError(f"--client-chunk-sizes must be 1 or more, got {min(sizes)}", status=MISUSED)
    return sizes


def labels(text: str | None) -> tuple[int, ...] | None:
    """None: the default labels. Raises CommandError."""
    ids = None if text is None else tuple(integers(text, "--label-token-ids"))
    if ids is not None and len(set(ids)) < len(ids):
        raise CommandError(f"--label-token-ids must be different ids, got {text!r}", status=MISUSED)
    return ids


_Python = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="The interpreter on the target that has prefixwise; default: the one of `ops install`."
    ),
]


@with_machine_options
@with_compare_options
def compare_backends(
    jax_target: JaxTarget = None,
    pytorch_target: PytorchTarget = None,
    jax_python: _Python = None,
    pytorch_python: _Python = None,
    client_chunk_sizes: ClientChunkSizes = None,
    label_token_ids: LabelTokenIds = None,
    server_flag: ServerFlag = None,
    jax_server_flag: JaxServerFlag = None,
    pytorch_server_flag: PytorchServerFlag = None,
    require_accelerator: RequireAccelerator = None,
    require_jax_accelerator: RequireJaxAccelerator = None,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    artifact_subdir: ArtifactSubdir = None,
    create_resources: CreateResources = False,
    teardown: Teardown = False,
    take_over: TakeOver = False,
    *,
    plan: ComparePlan,
    machines: ResourceOptions,
) -> None:
    """Compare JAX with PyTorch, each on its own target: workload, four matrices, comparison, report.

    Completed steps are skipped: the same command resumes an interrupted comparison, and does nothing if all is done.
    The exit status is 1 if scores do not agree, or no row of a matrix succeeded.
    """
    checked_root(artifact_root)
    checked_dtype(plan.dtype)
    plan = replace(
        plan,
        client_chunk_sizes=chunk_sizes(client_chunk_sizes),
        label_token_ids=labels(label_token_ids),
        server_flags=checked_server_flags(server_flag),
        jax_server_flags=checked_server_flags(jax_server_flag),
        pytorch_server_flags=checked_server_flags(pytorch_server_flag),
    )
    sides = {
        **_side("jax", target_of(jax_target, "gcloud-tpu", "TPU_NAME"), jax_python, require_jax_accelerator),
        **_side("pytorch", target_of(pytorch_target, "gcloud-gpu", "GPU_NAME"), pytorch_python, require_accelerator),
    }
    own = Machines([side.agent.target for side in sides.values()], machines, create=create_resources, delete=teardown)
    run = _run_of(plan, sides, artifact_root, artifact_subdir, take_over=take_over)
    with own.reported_after_failure(), _no_empty_folder(run.folder):
        missing = {step.backend for step in run.begin()}
        own.create([side for side in sides.values() if side.backend in missing])
        result = run()
        _print_result(result)
        if not result.passed:
            raise typer.Exit(FAILED)
    own.remove(run.used_targets)


def _side(
    backend: BackendName, target: str, python: str | None, accelerator: str | None
) -> dict[BackendName, CompareSide]:
    from prefixwise.bench.remote.agent_client import RemoteAgent
    from prefixwise.bench.remote.compare.run import CompareSide

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
        say(f"to resume or repeat it: the same command with --artifact-subdir {name}")
    return CompareRun(plan, sides, here, there, _watcher(), take_over)


@contextmanager
def _no_empty_folder(folder: Path) -> Iterator[None]:
    """Remove the folder if the run could not start and left it empty."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty, or never created
            folder.rmdir()
        raise


def _watcher() -> Watcher:
    from prefixwise.bench.remote.compare.run import NUM_STEPS
    from prefixwise.bench.remote.sweep import Watcher

    number = count(1)
    return Watcher(lambda title: say(f"[{next(number)}/{NUM_STEPS}] {title}"), lambda line: say(f"  {visible(line)}"))


def _print_result(result: CompareResult) -> None:
    """Print the result on stderr, then as JSON on stdout."""
    from prefixwise.bench.remote.compare.run import COMPARISON, REPORT_HTML, REPORT_MARKDOWN

    comparison = result.comparison
    for view, recommendation in comparison.recommendations.items():
        say(f"{view}: {recommendation}")
    if result.failed:
        say(f"no chunk size succeeded: {', '.join(result.failed)}", style="red")
    if not comparison.correctness["pass"]:
        say("the correctness gate failed", style="red")
    files = {"comparison_json": COMPARISON, "report": REPORT_MARKDOWN, "report_html": REPORT_HTML}
    last_line(
        {
            "folder": str(result.folder),
            **{name: str(result.folder / file) for name, file in files.items()},
            "pass": comparison.correctness["pass"],
            "portable_winner": comparison.portable_view.winner.backend,
            "best_native_winner": comparison.best_native_view.winner.backend,
            "matrices_failed": list(result.failed),
            "kept": list(result.skipped),
        }
    )
