"""Runs a batch job for `prefixwise batch`: loading, progress, warnings, the last line, the exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer

from prefixwise.cli.failures import FAILED, CommandError, print_error, print_warning
from prefixwise.cli.output import say
from prefixwise.cli.progress import (
    BatchProgress,
    print_loading,
    reading_progress,
    show_progress,
    warmup_progress,
)
from prefixwise.contract.errors import count
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.batch.job import BatchJob, BeginOptions, JobFiles, Totals
    from prefixwise.batch.parts import PartRecord
    from prefixwise.batch.requests import RowDefaults
    from prefixwise.batch.work_folder import OnResult, RowResult
    from prefixwise.batch.worker import PartTask
    from prefixwise.cli.server_address import ServerAddress
    from prefixwise.cluster.batch_job import WorkerOptions

    Records = Iterator[PartRecord]

_MAX_WARNINGS = 5  # of all rows together
_MORE_WARNINGS = "there are more warnings, which are not shown"
_SERVER_RETRIES = 100  # of a row, while the server is busy or restarts; its time limit ends them, too


@dataclass(frozen=True)
class RunOptions:
    """How a job runs; none of this changes its output."""

    engine: EngineOptions
    server: ServerAddress | None  # None: the engine scores
    workers: WorkerOptions | None  # None: this process
    max_failures: int | None
    quiet: bool
    for_documents: tuple[str, ...] = ()  # options on the command line that only rows with documents have


def run_batch(files: JobFiles, how: BeginOptions, defaults: RowDefaults, run: RunOptions) -> None:
    """Run the job from input to output. Raises `typer.Exit` if no row could be scored."""
    from prefixwise.batch.job import Finished, begin
    from prefixwise.batch.manifest import job_options
    from prefixwise.bench.processes import ended_by_signals

    with ended_by_signals():
        with _message_on_signals("stopped before this run scored a row; run the same command to start again"):
            scored_by = run.engine if run.server is None else run.server.url
            job = begin(files, job_options(scored_by, defaults), how, reading_progress(quiet=run.quiet))
        if isinstance(job, Finished):
            _print_end(job.totals, f"{files.output} is already finished", run, files)
            return
        with _resume_hint_on_failure(job):
            _score(job, defaults, run)
            totals = job.finish()
    if run.for_documents and totals.rows > totals.failures and not totals.reranked:
        print_warning(f"no row has documents: {', '.join(run.for_documents)} had no effect")
    _print_end(totals, f"{files.output} is written", run, files)


@contextmanager
def _message_on_signals(message: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        say(message)
        raise


@contextmanager
def _resume_hint_on_failure(job: BatchJob) -> Iterator[None]:
    """Print how to resume if the block fails: on a signal, a device error, too many failed rows.

    A new job without a complete part leaves nothing, so that the corrected command starts.
    """
    try:
        yield
    except BaseException as error:
        if not job.discard_if_new():
            say(f"stopped: completed parts are in {job.folder.url}; run the same command with --resume to continue")
        elif not isinstance(error, Exception):  # a signal
            say("stopped before a part was complete; run the same command to start again")
        raise


def _score(job: BatchJob, defaults: RowDefaults, run: RunOptions) -> None:
    """Score all missing parts."""
    from prefixwise.batch.worker import PartTask

    task = PartTask(job.manifest.files, defaults, job.parts)
    failures = sum(record.num_failures for record in job.done)
    progress = BatchProgress(job.manifest.num_rows, sum(record.num_rows for record in job.done), failures)
    _check_failures(failures, run.max_failures)
    if not job.missing:
        return
    if not run.quiet and job.done:
        say(f"resuming: {progress.done:,} of {progress.num_rows:,} rows are done")
    score = _on_cluster if run.workers else _on_server if run.server else _here
    records = score(job, task, run, progress)
    with show_progress(progress, quiet=run.quiet):
        _consume(records, failures, run.max_failures)


def _consume(records: Records, failures: int, most: int | None) -> None:
    """Raises CommandError if too many rows have failed."""
    printed: set[str] = set()
    for record in records:
        for warning in record.warnings:
            if warning not in printed and len(printed) <= _MAX_WARNINGS:
                printed.add(warning)
                print_warning(warning if len(printed) <= _MAX_WARNINGS else _MORE_WARNINGS)
        failures += record.num_failures
        _check_failures(failures, most)


def _check_failures(failures: int, most: int | None) -> None:
    if most is not None and failures > most:
        raise CommandError(f"expected at most {count(most, 'row')} to fail (--max-failures), got {failures:,}")


def _here(job: BatchJob, task: PartTask, run: RunOptions, progress: BatchProgress) -> Records:
    from prefixwise.batch import worker
    from prefixwise.batch.worker import score_locally

    print_loading(run.engine.model, quiet=run.quiet)
    with warmup_progress(quiet=run.quiet) as on_program:
        opened = worker.open_engine(run.engine, on_program)
    return score_locally(job.missing, task, opened, _adds_to(progress))


def _on_server(job: BatchJob, task: PartTask, run: RunOptions, progress: BatchProgress) -> Records:
    from prefixwise.batch.server import MAX_REQUESTS_IN_FLIGHT, score_on_server

    assert run.server is not None
    client = run.server.open(max_connections=MAX_REQUESTS_IN_FLIGHT, max_retries=_SERVER_RETRIES)
    return score_on_server(job.missing, task, client, _adds_to(progress))


def _adds_to(progress: BatchProgress) -> OnResult:
    def add(answer: RowResult) -> None:
        progress.add(1, answer.num_items, int(answer.is_failure))

    return add


def _on_cluster(job: BatchJob, task: PartTask, run: RunOptions, progress: BatchProgress) -> Records:
    from prefixwise.batch import worker
    from prefixwise.cluster.batch_job import score_on_cluster

    assert run.workers is not None
    open_engine = partial(worker.open_engine, run.engine)
    for record in score_on_cluster(job.missing, task, open_engine, run.workers):
        progress.add(record.num_rows, record.num_items, record.num_failures)
        yield record


def _print_end(totals: Totals, what: str, run: RunOptions, files: JobFiles) -> None:
    """Print the totals, and where failed rows are explained. The job fails only if every row has failed."""
    where = f": see {files.errors_name}" if totals.failures else ""
    if not run.quiet:
        scored = f"{count(totals.rows, 'row')}, {count(totals.items, 'item')} scored"
        say(f"{what}: {scored}, {count(totals.failures, 'row')} failed{where}", style="dim")
    if totals.rows and totals.failures == totals.rows:
        print_error(f"none of the {count(totals.rows, 'row')} could be scored{where}")
        raise typer.Exit(FAILED)
