"""The options of `prefixwise batch` that no other verb has: its files, how it begins and ends, and its cluster."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from prefixwise.batch.formats import FORMATS, FileFormat
from prefixwise.cli.common_options import input_option, output_option
from prefixwise.cli.engine_options import ENGINE_FLAGS, PROFILE_FLAG

job_option = partial(typer.Option, rich_help_panel="Job")
cluster_option = partial(typer.Option, rich_help_panel="Cluster")

BATCH_ENGINE_FLAGS = {"model": ENGINE_FLAGS["model"], "profile": PROFILE_FLAG, **ENGINE_FLAGS}

_FORMATS = ", ".join(FORMATS)
Input = Annotated[
    str,
    input_option(
        "--input",
        metavar="PATH",
        help="Rows of query and items, or query and documents: a file, a folder, a pattern, or a URL of any of them.",
    ),
]
InputFormat = Annotated[
    FileFormat | None,
    input_option("--input-format", metavar="NAME", help=f"{_FORMATS}; by the names of the files when left out."),
]
IdField = Annotated[str, input_option(metavar="NAME", help="The field that names a row; it is carried to the output.")]

Output = Annotated[
    str, output_option("--output", metavar="PATH", help="A row of scores for every row that could be scored.")
]
OutputFormat = Annotated[
    FileFormat | None,
    output_option("--output-format", metavar="NAME", help=f"{_FORMATS}; by the output's name when left out."),
]
Errors = Annotated[
    str | None,
    output_option(metavar="PATH", help="Rows that failed: file, line, why. OUTPUT.errors.jsonl when left out."),
]

Resume = Annotated[
    bool, job_option("--resume", metavar="", help="Go on with a job that was cut short; what is complete stays.")
]
Overwrite = Annotated[
    bool, job_option("--overwrite", metavar="", help="Begin anew: remove this output and what is left of its job.")
]
PartRows = Annotated[
    int, job_option(min=1, metavar="N", help="Most rows of a part, which is read, scored and kept as one.")
]
MaxFailures = Annotated[
    int | None,
    job_option(min=0, metavar="N", help="Stop when more rows than this have failed; never when left out."),
]

Cluster = Annotated[
    str | None,
    cluster_option(metavar="ADDRESS", help="Score on this Ray cluster; auto: the one of this machine."),
]
Workers = Annotated[
    str | None,
    cluster_option(metavar="N or MIN:MAX", help="Workers, each with an engine; as many as fit when left out."),
]
WorkerCpus = Annotated[
    float | None,
    cluster_option(min=0, metavar="N", help="CPU cores that a worker reserves; 1 when left out, none beside GPUs."),
]
WorkerGpus = Annotated[float, cluster_option(min=0, metavar="N", help="GPUs that a worker reserves.")]
WorkerResources = Annotated[
    list[str] | None,
    cluster_option(
        "--worker-resource", metavar="NAME=N", help="Another resource that it reserves, as in TPU=4; may be repeated."
    ),
]
