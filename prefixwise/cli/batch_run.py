"""A batch job as a person at a terminal sees it run: loading, progress, warnings, the last line, the exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer

from prefixwise.cli.batch_progress import BatchProgress, reading, shown
from prefixwise.cli.failures import FAILED, CommandError, tell_error
from prefixwise.cli.output import say
from prefixwise.cli.progress import tell_loading, warmup_progress
from prefixwise.cli.report_notes import tell_warning
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.batch.answers import RowAnswer
    from prefixwise.batch.job import BatchJob, BeginOptions
    from prefixwise.batch.job_files import JobFiles
    from prefixwise.batch.merge import Totals
    from prefixwise.batch.parts import PartRecord
    from prefixwise.batch.requests import RowDefaults
    from prefixwise.batch.score_parts import PartTask
    from prefixwise.cluster.workers import WorkerOptions

    Records = Iterator[PartRecord]


@dataclass(frozen=True)
class RunOptions:
    """How a job runs, which changes nothing about its output."""

    engine: EngineOptions
    workers: WorkerOptions | None  # None: this process
    max_failures: int | None
    quiet: bool


def run_batch(files: JobFiles, how: BeginOptions, defaults: RowDefaults, run: RunOptions) -> None:
    """From the input to the output. Raises `typer.Exit` where no row could be scored."""
    from prefixwise.batch.job import Finished, begin
    from prefixwise.batch.job_options import job_options
    from prefixwise.bench.termination import ended_by_signals

    with ended_by_signals():
        with _telling_on_signals("stopped before this run scored a row; the same command begins it again"):
            job = begin(files, job_options(run.engine, defaults), how, reading(quiet=run.quiet))
        if isinstance(job, Finished):
            _tell_end(job.totals, f"{files.output} is finished already", run)
            return
        with _telling_how_to_go_on(job.folder.url):
            _score(job, defaults, run)
            totals = job.finish()
    _tell_end(totals, f"{files.output} is written", run)


@contextmanager
def _telling_on_signals(words: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        say(words)
        raise


@contextmanager
def _telling_how_to_go_on(folder: str) -> Iterator[None]:
    """Whatever stops the block: a signal, a device, too many failures."""
    try:
        yield
    except BaseException:
        say(f"stopped: parts that were complete are kept in {folder}; the same command with --resume goes on")
        raise


def _score(job: BatchJob, defaults: RowDefaults, run: RunOptions) -> None:
    """All parts that are missing."""
    from prefixwise.batch.score_parts import PartTask

    task = PartTask(job.manifest.files, defaults, job.parts)
    failures = sum(record.num_failures for record in job.done)
    progress = BatchProgress(job.manifest.num_rows, sum(record.num_rows for record in job.done), failures)
    _check_failures(failures, run.max_failures)
    if not job.missing:
        return
    if not run.quiet and job.done:
        say(f"going on: {progress.done:,} of {progress.num_rows:,} rows are done")
    records = _on_cluster(job, task, run, progress) if run.workers else _here(job, task, run, progress)
    with shown(progress, quiet=run.quiet):
        _consume(records, failures, run.max_failures)


def _consume(records: Records, failures: int, most: int | None) -> None:
    """Raises CommandError where too many rows have failed."""
    told: set[str] = set()
    for record in records:
        for warning in record.warnings:
            if warning not in told:
                told.add(warning)
                tell_warning(warning)
        failures += record.num_failures
        _check_failures(failures, most)


def _check_failures(failures: int, most: int | None) -> None:
    if most is not None and failures > most:
        raise CommandError(f"expected at most {most} rows to fail (--max-failures), got {failures}")


def _here(job: BatchJob, task: PartTask, run: RunOptions, progress: BatchProgress) -> Records:
    from prefixwise.batch import engine
    from prefixwise.batch.run_local import score_locally

    tell_loading(run.engine.model, quiet=run.quiet)
    with warmup_progress(quiet=run.quiet) as on_program:
        opened = engine.open_engine(run.engine, on_program)

    def count(answer: RowAnswer) -> None:
        progress.add(1, answer.num_items, int(answer.is_failure))

    return score_locally(job.missing, task, opened, count)


def _on_cluster(job: BatchJob, task: PartTask, run: RunOptions, progress: BatchProgress) -> Records:
    from prefixwise.batch import engine
    from prefixwise.cluster.batch_job import score_on_cluster

    assert run.workers is not None
    open_engine = partial(engine.open_engine, run.engine)
    for record in score_on_cluster(job.missing, task, open_engine, run.workers):
        progress.add(record.num_rows, record.num_items, record.num_failures)
        yield record


def _tell_end(totals: Totals, what: str, run: RunOptions) -> None:
    """Every row may have failed, which is a failure of the job; that some did is told and no more."""
    if not run.quiet:
        say(
            f"{what}: {totals.rows:,} rows, {totals.items:,} items scored, {totals.failures:,} rows failed", style="dim"
        )
    if totals.rows and totals.failures == totals.rows:
        tell_error(f"none of the {totals.rows:,} rows could be scored; the error file says why")
        raise typer.Exit(FAILED)
