"""The options of a comparison of backends: what it measures, and where each backend runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from prefixwise.bench.remote.compare.plan import ComparePlan
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.harness_common import integers

_FLAGS = {
    "model": Flag(str, "On both targets: a folder, a .gguf file, a hub id, or embedded.", "MODEL"),
    "dtype": Flag(str, "Of all servers: auto, float32, bfloat16 or float16.", "NAME"),
    "query_tokens": Flag(int, "Tokens of the query.", least=1),
    "num_items": Flag(int, "Items of the request.", least=1),
    "item_tokens": Flag(int, "Tokens of an item.", least=1),
    "delimiter_token_id": Flag(int | None, "Between items; 151643 where the model has it.", "ID", least=0),
    "warmup_runs": Flag(int, "Before each chunk size, not counted.", least=0),
    "timed_runs": Flag(int, "Of each chunk size.", least=1),
    "timed_runs_confirm": Flag(int, "Of the best ones and their neighbours, again; 0: not again.", least=0),
    "timeout_sec": Flag(float, "For one call.", "SECONDS", least=0.001),
    "jax_server_chunk_size": Flag(int, "Of JAX's server in the best-native view.", least=1),
    "correctness_threshold_max_abs": Flag(float, "How far one score may be from PyTorch's.", "X", least=0),
    "correctness_threshold_mean_abs": Flag(float, "How far all may be, on average.", "X", least=0),
    "start_timeout_sec": Flag(float, "For a server to be ready.", "SECONDS", least=1),
}

with_compare_options = with_flags("plan", ComparePlan, _FLAGS, panel="Measurement")

ClientChunkSizes = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Items in one call; 1,2,4,8,16,32,64,128,256,500 as far as there are items."),
]
LabelTokenIds = Annotated[
    str | None,
    typer.Option(metavar="IDS", help="Whose probabilities are asked for; 9454,2753 where the model has them."),
]
JaxServerFlag = Annotated[list[str] | None, typer.Option(metavar="FLAG", help="For JAX's servers only.")]
PytorchServerFlag = Annotated[list[str] | None, typer.Option(metavar="FLAG", help="For PyTorch's servers only.")]
JaxTarget = Annotated[
    str | None,
    typer.Option(metavar="TARGET", help="Where JAX runs: gcloud-tpu://$TPU_NAME where that is set, else local."),
]
PytorchTarget = Annotated[
    str | None,
    typer.Option(metavar="TARGET", help="Where PyTorch runs: gcloud-gpu://$GPU_NAME where that is set, else local."),
]
RequireAccelerator = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of PyTorch's target, a part of its name, as 'RTX PRO 6000' (G4); nothing is run without it.",
    ),
]
RequireJaxAccelerator = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of JAX's target, as 'TPU v6'; likewise.")
]
ArtifactRoot = Annotated[
    str, typer.Option("--artifact-root", metavar="DIR", help="Where the folders of runs are, here and on the targets.")
]
CreateResources = Annotated[
    bool,
    typer.Option(
        "--create-resources", envvar="CREATE_RESOURCES", metavar="", help="Make the gcloud targets that are not there."
    ),
]
Teardown = Annotated[
    bool,
    typer.Option(
        "--teardown", envvar="TEARDOWN_AT_END", metavar="", help="Delete the gcloud targets after a run that went well."
    ),
]


def target_of(given: str | None, scheme: str, variable: str) -> str:
    """As the runbook names machines."""
    name = os.environ.get(variable)
    return given or (f"{scheme}://{name}" if name else "local")


def chunk_sizes(text: str | None) -> tuple[int, ...]:
    """Empty: those that fit. Raises CommandError."""
    sizes = () if text is None else tuple(dict.fromkeys(integers(text, "--client-chunk-sizes")))
    if sizes and min(sizes) < 1:
        raise CommandError(f"--client-chunk-sizes must be 1 or more, got {min(sizes)}", status=MISUSED)
    return sizes


def labels(text: str | None) -> tuple[int, ...] | None:
    """None: the default ones. Raises CommandError."""
    ids = None if text is None else tuple(integers(text, "--label-token-ids"))
    if ids is not None and len(set(ids)) < len(ids):
        raise CommandError(f"--label-token-ids must be different ids, got {text!r}", status=MISUSED)
    return ids
