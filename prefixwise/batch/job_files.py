"""The files of a job: what comes in, what goes out, and that none of them is in another's way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixwise.batch.formats import FileFormat, input_format, output_format
from prefixwise.batch.part_store import part_name
from prefixwise.batch.parts import InputFile
from prefixwise.batch.storage import absolute, find_files, is_several, is_within, resolved
from prefixwise.batch.writers import checked_format
from prefixwise.contract.errors import BatchError

_SOME_PART = part_name("0" * 12, 0)


@dataclass(frozen=True)
class OutputFiles:
    """Where a job's results go, and what it needs on the way."""

    output: str
    errors: str
    format: FileFormat
    with_file: bool  # rows name their file, since there are several

    @property
    def record(self) -> str:
        """Beside the output: what job it was made by."""
        return f"{self.output}.job.json"

    @property
    def work_folder(self) -> str:
        """There until the job ends."""
        return f"{self.output}.parts"


@dataclass(frozen=True)
class JobFiles:
    """What comes in, what goes out, and in which formats."""

    input: str
    output: str
    errors: str | None = None  # None: OUTPUT.errors.jsonl
    input_format: FileFormat | None = None  # None: by the names
    output_format: FileFormat | None = None

    def inputs(self) -> tuple[InputFile, ...]:
        """As they are now. Raises BatchError for none, and for one that nobody can read."""
        return tuple(
            InputFile(found.url, found.name, input_format(found.name, self.input_format), found.size, found.version)
            for found in find_files(self.input)
        )

    def outputs(self) -> OutputFiles:
        """Raises BatchError where they could not be written: now, and not after all rows are scored."""
        output = absolute(self.output)
        to = OutputFiles(
            output=output,
            errors=f"{output}.errors.jsonl" if self.errors is None else absolute(self.errors),
            format=checked_format(output_format(self.output, self.output_format)),
            with_file=is_several(self.input),
        )
        made = (to.output, to.errors, to.record, f"{to.work_folder}/{_SOME_PART}")
        _check_not_within(made, self.input)
        _check_errors_apart(to)
        return to


def _check_not_within(urls: Sequence[str], source: str) -> None:
    for url in urls:
        if is_within(url, source):
            words = "it would be read as rows; choose another --output or --errors"
            raise BatchError(f"{url} must not be a part of the input {source}: {words}")


def _check_errors_apart(to: OutputFiles) -> None:
    """The other names differ from each other by what they end in."""
    if resolved(to.errors) in (resolved(to.output), resolved(to.record)) or is_within(to.errors, to.work_folder):
        others = f"{to.output}, {to.record} or {to.work_folder}"
        raise BatchError(f"--errors must be a file of its own, apart from {others}, got {to.errors}")
