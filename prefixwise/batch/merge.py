"""The end of a job: all parts in their order into the output and the error file, one part in memory at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from prefixwise.batch.answers import num_scored
from prefixwise.batch.job_files import OutputFiles
from prefixwise.batch.manifest import Manifest
from prefixwise.batch.part_store import PartStore
from prefixwise.batch.parts import Part
from prefixwise.batch.storage import writing
from prefixwise.batch.writers import open_writer
from prefixwise.contract.errors import BatchError


@dataclass(frozen=True)
class Totals:
    """Of all rows of a job."""

    rows: int = 0
    failures: int = 0
    items: int = 0


def merge(manifest: Manifest, parts: PartStore, to: OutputFiles) -> Totals:
    """Every row is in one of the two files exactly once. Raises BatchError where a part is not whole."""
    rows = failures = items = 0
    with ExitStack() as stack:
        errors = stack.enter_context(writing(to.errors, _within(to.errors, to)))
        output = stack.enter_context(writing(to.output, _within(to.output, to)))
        writer = stack.enter_context(open_writer(to.format, output, with_file=to.with_file))
        for part in manifest.parts:
            name = manifest.files[part.file].name
            answers = _whole_part(parts, part)
            failed = [_error_row(answer, name) for answer in answers if "error" in answer]
            scored = [_output_row(answer, name, to) for answer in answers if "error" not in answer]
            writer.write(scored)
            errors.write("".join(json.dumps(each) + "\n" for each in failed).encode())
            rows, failures = rows + len(answers), failures + len(failed)
            items += sum(map(num_scored, scored))
    return Totals(rows, failures, items)


def _within(url: str, to: OutputFiles) -> str | None:
    """The work folder, so that nothing half-written stays; but another folder may be on another disk."""
    is_beside = url.rpartition("/")[0] == to.work_folder.rpartition("/")[0]
    return to.work_folder if is_beside else None


def _whole_part(parts: PartStore, part: Part) -> list[dict[str, Any]]:
    answers = list(parts.read(part))
    if len(answers) != part.num_rows:
        raise BatchError(f"part {part.index} is damaged: expected {part.num_rows} rows, got {len(answers)}; --resume")
    return answers


def _output_row(answer: dict[str, Any], file_name: str, to: OutputFiles) -> dict[str, Any]:
    return {"file": file_name, **answer} if to.with_file else answer


def _error_row(answer: dict[str, Any], file_name: str) -> dict[str, Any]:
    return {"file": file_name, "line": answer["line"], "id": answer.get("id"), **answer["error"]}
