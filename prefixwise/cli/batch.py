"""`prefixwise batch`: rows of files to scores in files, in this process or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.batch.formats import FORMATS, FileFormat
from prefixwise.cli import request_options as option
from prefixwise.cli.batch_run import RunOptions, run_batch
from prefixwise.cli.engine_options import ENGINE_FLAGS, PANEL, PROFILE_FLAG
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import is_typed, with_flags
from prefixwise.cli.request_options import input_option, output_option
from prefixwise.cli.server_address import ApiKey, Timeout, Url, server_address
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.contract.rerank_request import rerank_fields
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.batch.requests import RowDefaults
    from prefixwise.cluster.batch_job import WorkerOptions

job_option = partial(typer.Option, rich_help_panel="Job")
cluster_option = partial(typer.Option, rich_help_panel="Cluster")

_SCORE_NAMES = {row.name for row in SCORE_FIELDS}
_FOR_DOCUMENTS = {
    row.name: option.option_names(row)[0]
    for row in rerank_fields("native")
    if row.option is not None and row.name not in _SCORE_NAMES
}
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
    input_option("--input-format", metavar="NAME", help=f"{_FORMATS}; default: by the names of the files."),
]
IdField = Annotated[
    str, input_option(metavar="NAME", help="The field that identifies a row; it is copied to the output.")
]

Output = Annotated[
    str, output_option("--output", metavar="PATH", help="One row of scores for every row that could be scored.")
]
OutputFormat = Annotated[
    FileFormat | None,
    output_option("--output-format", metavar="NAME", help=f"{_FORMATS}; default: by the output's name."),
]
Errors = Annotated[
    str | None,
    output_option(metavar="PATH", help="Failed rows: file, line, reason. Default: OUTPUT.errors.jsonl."),
]

Resume = Annotated[
    bool, job_option("--resume", metavar="", help="Resume an interrupted job; completed parts are not scored again.")
]
Overwrite = Annotated[
    bool, job_option("--overwrite", metavar="", help="Start over: remove this output and the rest of its job.")
]
PartRows = Annotated[
    int, job_option(min=1, metavar="N", help="Maximum rows of a part, the unit that is read, scored and stored.")
]
MaxFailures = Annotated[
    int | None,
    job_option(min=0, metavar="N", help="Stop when more rows than this have failed; default: never."),
]

Cluster = Annotated[
    str | None,
    cluster_option(metavar="ADDRESS", help="Score on this Ray cluster; auto: this machine's."),
]
Workers = Annotated[
    str | None,
    cluster_option(metavar="N or MIN:MAX", help="Workers, each with an engine; default: as many as fit."),
]
WorkerCpus = Annotated[
    float | None,
    cluster_option(min=0, metavar="N", help="CPU cores that a worker reserves; default: 1, or 0 with GPUs."),
]
WorkerGpus = Annotated[float, cluster_option(min=0, metavar="N", help="GPUs that a worker reserves.")]
WorkerResources = Annotated[
    list[str] | None,
    cluster_option(
        "--worker-resource",
        metavar="NAME=N",
        help="Another resource that a worker reserves, as in TPU=4; may be repeated.",
    ),
]


@with_flags("engine", EngineOptions, BATCH_ENGINE_FLAGS, panel=PANEL)
@option.with_request_fields(score=SCORE_FIELDS, rerank=rerank_fields("native"))
def batch(
    context: typer.Context,
    input_path: Input,
    output: Output,
    input_format: InputFormat = None,
    id_field: IdField = "id",
    output_format: OutputFormat = None,
    errors: Errors = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    part_rows: PartRows = 1024,
    max_failures: MaxFailures = None,
    cluster: Cluster = None,
    workers: Workers = None,
    worker_cpus: WorkerCpus = None,
    worker_gpus: WorkerGpus = 0,
    worker_resources: WorkerResources = None,
    *,
    score: Mapping[str, object],
    rerank: Mapping[str, object],
    quiet: option.Quiet = False,
    url: Url = None,
    api_key: ApiKey = None,
    timeout_sec: Timeout = 180.0,
    engine: EngineOptions,
) -> None:
    """Score the rows of files: each row is a body of /v1/score, or of /v1/rerank where it has documents.

    The options under Scoring, and labels, are defaults for rows that do not have those fields. An example:

    \b
      prefixwise batch --input rows.jsonl --output scores.csv -l " yes" -l " no"
    """
    from prefixwise.batch.job import BeginOptions, JobFiles
    from prefixwise.batch.parts import PartLimits
    from prefixwise.batch.requests import RowDefaults

    if resume and overwrite:
        raise CommandError("--resume and --overwrite exclude each other", status=MISUSED)
    server = server_address(context, url, api_key, timeout_sec, ENGINE_FLAGS, ("cluster",))
    of_server = {} if server is None else {"profile": engine.profile}
    defaults = RowDefaults(_given(score), _given({**rerank, **of_server}), id_field)
    _check_defaults(defaults)
    on_cluster = _workers(cluster, workers, worker_cpus, worker_gpus, worker_resources or ())
    for_documents = tuple(name for field, name in _FOR_DOCUMENTS.items() if is_typed(context, field))
    run = RunOptions(engine, server, on_cluster, max_failures, quiet, for_documents)
    files = JobFiles(input_path, output, errors, input_format, output_format)
    run_batch(files, BeginOptions(PartLimits(part_rows), resume, overwrite), defaults, run)


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_defaults(defaults: RowDefaults) -> None:
    """Raise RequestError for defaults that no row can be scored with, before anything is read."""
    from prefixwise.batch.requests import parse_row

    labels = {} if {"labels", "label_token_ids"} & set(defaults.score) else {"labels": ["y", "n"]}
    parse_row({"query": "q", "items": ["i"], **labels}, defaults)
    parse_row({"query": "q", "documents": ["d"]}, defaults)


def _workers(
    cluster: str | None, count: str | None, cpus: float | None, gpus: float, resources: Sequence[str]
) -> WorkerOptions | None:
    if cluster is None:
        if count is not None or resources or gpus or cpus is not None:
            raise CommandError("--workers and --worker-... are for a cluster: expected --cluster, too", status=MISUSED)
        return None
    from prefixwise.cluster.batch_job import WorkerOptions, parse_count, parse_resources

    return WorkerOptions(cluster, *parse_count(count), cpus, gpus, parse_resources(resources))
