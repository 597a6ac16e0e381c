"""A batch job from its input to its output.

begin   resume the job in the work folder, or split the input into parts
score   the missing parts, in this process (`worker.py`) or on a cluster (`cluster/batch_job.py`)
finish  merge all parts into the output, remove the work folder, and leave a record of the job beside the output
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from prefixwise.batch.formats import FileFormat, input_format, output_format
from prefixwise.batch.manifest import Manifest, check_same_job
from prefixwise.batch.parts import InputFile, OnRows, Part, PartLimits, PartRecord, split_files
from prefixwise.batch.storage import (
    abort_uploads,
    absolute,
    exists,
    find_files,
    has_many_files,
    is_within,
    read_bytes,
    remove_file,
    resolved,
    write_file,
    writing,
)
from prefixwise.batch.work_folder import PartStore, WorkFolder, num_scored, part_name
from prefixwise.batch.writers import checked_format, open_writer
from prefixwise.contract.errors import BatchError

_ANY_PART = part_name("0" * 12, 0)


@dataclass(frozen=True)
class OutputFiles:
    """The files that a job writes."""

    output: str
    errors: str
    format: FileFormat
    with_file: bool  # rows name their input file, because there are several

    @property
    def record(self) -> str:
        """Describes the job that made the output."""
        return f"{self.output}.job.json"

    @property
    def work_folder(self) -> str:
        """Exists until the job ends."""
        return f"{self.output}.parts"


@dataclass(frozen=True)
class JobFiles:
    """The input and output as the command line names them."""

    input: str
    output: str
    errors: str | None = None  # None: OUTPUT.errors.jsonl
    input_format: FileFormat | None = None  # None: by the suffixes
    output_format: FileFormat | None = None

    @property
    def errors_name(self) -> str:
        """The error file, as the command line names it."""
        return f"{self.output}.errors.jsonl" if self.errors is None else self.errors

    def inputs(self) -> tuple[InputFile, ...]:
        """The input files as they are now. Raises BatchError where there are none, or one has an unknown format."""
        return tuple(
            InputFile(found.url, found.name, input_format(found.name, self.input_format), found.size, found.version)
            for found in find_files(self.input)
        )

    def outputs(self) -> OutputFiles:
        """Raises BatchError where they cannot be written: before the first row is scored, not after the last."""
        output = absolute(self.output)
        to = OutputFiles(
            output=output,
            errors=absolute(self.errors_name),
            format=checked_format(output_format(self.output, self.output_format)),
            with_file=has_many_files(self.input),
        )
        written = (to.output, to.errors, to.record, f"{to.work_folder}/{_ANY_PART}")
        _check_not_in_input(written, self.input)
        _check_errors_file(to)
        return to


def _check_not_in_input(urls: Sequence[str], source: str) -> None:
    for url in urls:
        if is_within(url, source):
            reason = "it would be read as rows; choose another --output or --errors"
            raise BatchError(f"{url} must not be a part of the input {source}: {reason}")


def _check_errors_file(to: OutputFiles) -> None:
    """The suffixes keep the other files apart; --errors may be any name."""
    if resolved(to.errors) in (resolved(to.output), resolved(to.record)) or is_within(to.errors, to.work_folder):
        others = f"{to.output}, {to.record} or {to.work_folder}"
        raise BatchError(f"--errors must be a file of its own, apart from {others}, got {to.errors}")


@dataclass(frozen=True)
class BatchJob:
    """A job that has begun; `done` are the parts that an earlier run has completed."""

    manifest: Manifest
    to: OutputFiles
    done: tuple[PartRecord, ...] = ()
    run: str | None = None  # the id of this run, if it has made the work folder

    @property
    def folder(self) -> WorkFolder:
        return WorkFolder(self.to.work_folder)

    @property
    def parts(self) -> PartStore:
        return self.folder.parts_of(self.manifest)

    @property
    def missing(self) -> list[Part]:
        complete = {record.index for record in self.done}
        return [part for part in self.manifest.parts if part.index not in complete]

    def discard_if_new(self) -> bool:
        """Remove the work folder that this run has made, unless a part is complete. Returns whether it has."""
        with suppress(BatchError, ValueError):  # a store that is away, or a damaged manifest
            return self.run is not None and self.folder.remove_without_parts(self.run)
        return False

    def finish(self) -> Totals:
        """Write the output. Raises BatchError where a part is missing or the input has changed."""
        self.folder.check_is_of(self.manifest)
        for file in self.manifest.files:
            file.check_unchanged()
        totals = merge(self.manifest, self.parts, self.to)
        record = {**json.loads(Manifest(self.manifest.files, self.manifest.options).to_json()), **asdict(totals)}
        write_file(self.to.record, json.dumps(record, indent=2).encode() + b"\n", within=self.to.work_folder)
        self.folder.remove()
        return totals


@dataclass(frozen=True)
class Finished:
    """A job that an earlier run has finished."""

    totals: Totals


@dataclass(frozen=True)
class BeginOptions:
    """The size of parts, and what to do with an existing job or output."""

    limits: PartLimits = field(default_factory=PartLimits)
    resume: bool = False
    overwrite: bool = False


def begin(
    files: JobFiles,
    options: Mapping[str, object],
    how: BeginOptions,
    on_rows: OnRows = lambda rows: None,
) -> BatchJob | Finished:
    """`options`: of `job_options`. Raises BatchError for an existing output that is not resumed or overwritten."""
    to = files.outputs()
    folder = WorkFolder(to.work_folder)
    wanted = Manifest(files.inputs(), {**options, "part_rows": how.limits.num_rows})
    if how.resume and folder.has_manifest():
        return _resume(folder, to, wanted)
    if how.resume and exists(to.output):
        finished = _finished(to, wanted)
        folder.remove()  # the job may have been killed before it did so
        return finished
    if not how.resume and not how.overwrite:
        _check_nothing_exists(to, folder)
    manifest = Manifest(wanted.files, wanted.options, tuple(split_files(wanted.files, how.limits, on_rows)))
    if how.overwrite:  # only once all of the input could be read
        _clear(to)
    folder.remove()  # of the overwritten job, or of one that was killed before it wrote its manifest
    return BatchJob(manifest, to, run=folder.write_manifest(manifest))


def _resume(folder: WorkFolder, to: OutputFiles, wanted: Manifest) -> BatchJob:
    """Raises BatchError where the folder belongs to another job."""
    manifest = folder.read_manifest()
    check_same_job(manifest, wanted)
    folder.write_manifest(manifest)  # a run that began the job, and still runs, does not remove it any more
    return BatchJob(manifest, to, tuple(folder.parts_of(manifest).complete(manifest.parts)))


def _check_nothing_exists(to: OutputFiles, folder: WorkFolder) -> None:
    found = [url for url in (to.output, to.errors) if exists(url)]
    if folder.has_manifest():
        found.append(folder.url)
    if found:
        raise BatchError(f"{found[0]} exists already; --resume continues that job, --overwrite begins anew")


def _clear(to: OutputFiles) -> None:
    for url in (to.record, to.output, to.errors):
        remove_file(url)


def _finished(to: OutputFiles, wanted: Manifest) -> Finished:
    """Raises BatchError where the output is of another or an unknown job."""
    if not exists(to.record):
        raise BatchError(f"{to.output} exists without {to.record}, the record of its job; --overwrite begins anew")
    content = read_bytes(to.record)
    check_same_job(Manifest.from_json(content, to.record), wanted)
    record = json.loads(content)
    return Finished(Totals(record["rows"], record["failures"], record["items"]))


@dataclass(frozen=True)
class Totals:
    """Counts over all rows of a job."""

    rows: int = 0
    failures: int = 0
    items: int = 0
    reranked: int = 0  # rows with documents that are scored


def merge(manifest: Manifest, parts: PartStore, to: OutputFiles) -> Totals:
    """Write all parts in order, one part in memory at a time: every row goes to the output or to the error file, once.
    Raises BatchError where a part is incomplete."""
    rows = failures = items = reranked = 0
    abort_uploads((to.output, to.errors))
    with ExitStack() as stack:
        errors = stack.enter_context(writing(to.errors, _within(to.errors, to)))
        output = stack.enter_context(writing(to.output, _within(to.output, to)))
        writer = stack.enter_context(open_writer(to.format, output, with_file=to.with_file))
        for part in manifest.parts:
            name = manifest.files[part.file].name
            rows_of_part = _complete_part(parts, part)
            failed = [_error_row(row, name) for row in rows_of_part if "error" in row]
            scored = [_output_row(row, name, to) for row in rows_of_part if "error" not in row]
            writer.write(scored)
            errors.write("".join(json.dumps(each) + "\n" for each in failed).encode())
            rows, failures = rows + len(rows_of_part), failures + len(failed)
            items += sum(map(num_scored, scored))
            reranked += sum("results" in row for row in scored)
    return Totals(rows, failures, items, reranked)


def _within(url: str, to: OutputFiles) -> str | None:
    """The work folder for temporary files, so that a killed job leaves none behind; None for a file in another folder,
    which may be on another disk."""
    is_beside = url.rpartition("/")[0] == to.work_folder.rpartition("/")[0]
    return to.work_folder if is_beside else None


def _complete_part(parts: PartStore, part: Part) -> list[dict[str, Any]]:
    rows = list(parts.read(part))
    if len(rows) != part.num_rows:
        raise BatchError(f"part {part.index} is damaged: expected {part.num_rows} rows, got {len(rows)}; --resume")
    return rows


def _output_row(row: dict[str, Any], file_name: str, to: OutputFiles) -> dict[str, Any]:
    return {"file": file_name, **row} if to.with_file else row


def _error_row(row: dict[str, Any], file_name: str) -> dict[str, Any]:
    return {"file": file_name, "line": row["line"], "id": row.get("id"), **row["error"]}
