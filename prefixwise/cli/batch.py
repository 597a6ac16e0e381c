"""`prefixwise batch`: rows of files to scores in files, in this process or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prefixwise.cli import batch_options as batch_option
from prefixwise.cli import common_options as common
from prefixwise.cli import rerank_options, score_options
from prefixwise.cli.batch_run import RunOptions, run_batch
from prefixwise.cli.engine_options import PANEL
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import with_flags
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.batch.requests import RowDefaults
    from prefixwise.cluster.workers import WorkerOptions


@with_flags("engine", EngineOptions, batch_option.BATCH_ENGINE_FLAGS, panel=PANEL)
def batch(
    input_path: batch_option.Input,
    output: batch_option.Output,
    input_format: batch_option.InputFormat = None,
    id_field: batch_option.IdField = "id",
    output_format: batch_option.OutputFormat = None,
    errors: batch_option.Errors = None,
    resume: batch_option.Resume = False,
    overwrite: batch_option.Overwrite = False,
    part_rows: batch_option.PartRows = 1024,
    max_failures: batch_option.MaxFailures = None,
    cluster: batch_option.Cluster = None,
    workers: batch_option.Workers = None,
    worker_cpus: batch_option.WorkerCpus = None,
    worker_gpus: batch_option.WorkerGpus = 0,
    worker_resources: batch_option.WorkerResources = None,
    labels: score_options.Labels = None,
    label_token_ids: score_options.LabelTokenIds = None,
    suffix: score_options.Suffix = None,
    softmax: score_options.Softmax = False,
    score_mode: score_options.ScoreModeOption = None,
    label_scoring: score_options.LabelScoringOption = "single",
    tokenization: score_options.TokenizationOption = "apart",
    item_first: score_options.ItemFirst = False,
    max_tokens_per_item: score_options.MaxTokensPerItem = None,
    on_item_error: score_options.OnItemErrorOption = "fail",
    instruction: rerank_options.Instruction = None,
    max_tokens_per_doc: rerank_options.MaxTokensPerDoc = None,
    max_chunks_per_doc: rerank_options.MaxChunksPerDoc = None,
    no_truncate: rerank_options.NoTruncate = False,
    top_n: rerank_options.TopN = None,
    algorithm: common.AlgorithmOption = "auto",
    quiet: common.Quiet = False,
    *,
    engine: EngineOptions,
) -> None:
    """Score the rows of files: each row is a body of /v1/score, or of /v1/rerank where it has documents.

    The options under Scoring, and labels, hold for rows that do not have those fields themselves.
    """
    from prefixwise.batch.job import BeginOptions
    from prefixwise.batch.job_files import JobFiles
    from prefixwise.batch.parts import PartLimits
    from prefixwise.batch.requests import RowDefaults

    if resume and overwrite:
        raise CommandError("--resume and --overwrite exclude each other", status=MISUSED)
    score = {
        "labels": labels or None,
        "label_token_ids": label_token_ids or None,
        "suffix": suffix,
        "apply_softmax": softmax or None,
        "score_mode": score_mode,
        "label_scoring": label_scoring,
        "tokenization": tokenization,
        "item_first": item_first,
        "max_tokens_per_item": max_tokens_per_item,
        "on_item_error": on_item_error,
        "algorithm": algorithm,
    }
    rerank = {
        "instruction": instruction,
        "max_tokens_per_doc": max_tokens_per_doc,
        "max_chunks_per_doc": max_chunks_per_doc,
        "truncate": not no_truncate,
        "top_n": top_n,
        "algorithm": algorithm,
    }
    defaults = RowDefaults(_given(score), _given(rerank), id_field)
    _check_defaults(defaults)
    run = RunOptions(
        engine, _workers(cluster, workers, worker_cpus, worker_gpus, worker_resources or ()), max_failures, quiet
    )
    files = JobFiles(input_path, output, errors, input_format, output_format)
    run_batch(files, BeginOptions(PartLimits(part_rows), resume, overwrite), defaults, run)


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_defaults(defaults: RowDefaults) -> None:
    """What no row can be scored with is told before anything is read."""
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
    from prefixwise.cluster.workers import WorkerOptions, parse_count, parse_resources

    return WorkerOptions(cluster, *parse_count(count), cpus, gpus, parse_resources(resources))
