"""A batch job from its input to its output, whoever scores its parts.

begin   is there a job to go on with? else the input is cut into parts
score   the parts that are missing, here or on a cluster
merge   all parts into the output; then the work folder goes, and a record of the job stays beside the output
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from prefixwise.batch.cut import OnRows, cut
from prefixwise.batch.job_files import JobFiles, OutputFiles
from prefixwise.batch.manifest import Manifest, check_same_job
from prefixwise.batch.merge import Totals, merge
from prefixwise.batch.part_store import PartStore
from prefixwise.batch.parts import Part, PartLimits, PartRecord
from prefixwise.batch.storage import exists, read_bytes, remove_file, write_whole
from prefixwise.batch.unchanged import check_unchanged
from prefixwise.batch.work_folder import WorkFolder
from prefixwise.contract.errors import BatchError


@dataclass(frozen=True)
class BatchJob:
    """A job that has begun."""

    manifest: Manifest
    to: OutputFiles
    done: tuple[PartRecord, ...] = ()  # from before

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

    def finish(self) -> Totals:
        """Write the output. Raises BatchError where a part is missing, or where the scores are of what is no more."""
        self.folder.check_is_of(self.manifest)
        for file in self.manifest.files:
            check_unchanged(file)
        totals = merge(self.manifest, self.parts, self.to)
        record = {**json.loads(Manifest(self.manifest.files, self.manifest.options).to_json()), **asdict(totals)}
        write_whole(self.to.record, json.dumps(record, indent=2).encode() + b"\n", within=self.to.work_folder)
        self.folder.remove()
        return totals


@dataclass(frozen=True)
class Finished:
    """A job that had been done before."""

    totals: Totals


@dataclass(frozen=True)
class BeginOptions:
    """How to begin."""

    limits: PartLimits = field(default_factory=PartLimits)
    resume: bool = False
    overwrite: bool = False


def begin(
    files: JobFiles,
    options: Mapping[str, object],
    how: BeginOptions,
    on_rows: OnRows = lambda rows: None,
) -> BatchJob | Finished:
    """`options`: all that decides about scores, as plain JSON. Raises BatchError where the output is in the way."""
    to = files.outputs()
    folder = WorkFolder(to.work_folder)
    wanted = Manifest(files.inputs(), {**options, "part_rows": how.limits.num_rows})
    if how.resume and folder.has_manifest():
        return _go_on(folder, to, wanted)
    if how.resume and exists(to.output):
        finished = _finished(to, wanted)
        folder.remove()  # where a job ended before it had cleared up
        return finished
    if not how.resume and not how.overwrite:
        _refuse_what_is_there(to, folder)
    manifest = Manifest(wanted.files, wanted.options, tuple(cut(wanted.files, how.limits, on_rows)))
    if how.overwrite:  # not before all of the input could be read
        _clear(to)
    folder.remove()  # of a job that is overwritten; what one without a manifest has left is nobody's
    folder.write_manifest(manifest)
    return BatchJob(manifest, to)


def _go_on(folder: WorkFolder, to: OutputFiles, wanted: Manifest) -> BatchJob:
    """Raises BatchError where it is another job's folder."""
    manifest = folder.read_manifest()
    check_same_job(manifest, wanted)
    return BatchJob(manifest, to, tuple(folder.parts_of(manifest).complete(manifest.parts)))


def _refuse_what_is_there(to: OutputFiles, folder: WorkFolder) -> None:
    there = [url for url in (to.output, to.errors) if exists(url)]
    if folder.has_manifest():
        there.append(folder.url)
    if there:
        raise BatchError(f"{there[0]} is there already; --resume goes on with that job, --overwrite begins anew")


def _clear(to: OutputFiles) -> None:
    for url in (to.record, to.output, to.errors):
        remove_file(url)


def _finished(to: OutputFiles, wanted: Manifest) -> Finished:
    """Raises BatchError where the output is of another job, or of nobody knows which."""
    if not exists(to.record):
        raise BatchError(f"{to.output} is there, and no {to.record} that says what it is of; --overwrite begins anew")
    content = read_bytes(to.record)
    check_same_job(Manifest.from_json(content, to.record), wanted)
    record = json.loads(content)
    return Finished(Totals(record["rows"], record["failures"], record["items"]))
