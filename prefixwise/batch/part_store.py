"""The parts of one job that are done, in its work folder: a job reads and counts its own parts alone.

    part-1f0c2b9a77de-00000000.jsonl   all rows of the job's first part in their order, with their scores or errors

The letters are the job's key: another job that was begun at the same output has another, so the two never mix.
A part's object is there whole or not at all, and its rows are counted before it is believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwise.batch.answers import RowAnswer, num_scored
from prefixwise.batch.clear_errors import clear_errors
from prefixwise.batch.parts import Part, PartRecord
from prefixwise.batch.storage import list_names, open_file, write_whole
from prefixwise.contract.errors import BatchError

PART_NAME = re.compile(r"part-[0-9a-f]{12}-\d{8}\.jsonl")


@dataclass(frozen=True)
class PartStore:
    """Plain values, so that workers elsewhere can be sent it."""

    folder: str  # a URL that every worker reaches
    job_key: str

    def write(self, part: Part, answers: Sequence[RowAnswer]) -> None:
        """Raises BatchError."""
        lines = [json.dumps(answer.to_json(), ensure_ascii=True, allow_nan=False) + "\n" for answer in answers]
        write_whole(self._url_of(part), "".join(lines).encode())

    def read(self, part: Part) -> Iterator[dict[str, Any]]:
        """Its rows in order. Raises BatchError where it is damaged."""
        url = self._url_of(part)
        with clear_errors(url), open_file(url) as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise BatchError(f"{url} is damaged: {error}; remove it, and --resume") from None

    def complete(self, parts: Sequence[Part]) -> list[PartRecord]:
        """Those that are there with all their rows; one that is damaged counts as missing."""
        names = set(list_names(self.folder))
        there = [part for part in parts if self._name(part) in names]
        records = [(part, self._record(part)) for part in there]
        return [record for part, record in records if record is not None and record.num_rows == part.num_rows]

    def _record(self, part: Part) -> PartRecord | None:
        num_rows = num_items = num_failures = 0
        try:
            for row in self.read(part):
                num_rows += 1
                num_failures += "error" in row
                num_items += num_scored(row)
        except BatchError:
            return None
        return PartRecord(part.index, num_rows, num_items, num_failures)

    def _url_of(self, part: Part) -> str:
        return f"{self.folder}/{self._name(part)}"

    def _name(self, part: Part) -> str:
        return part_name(self.job_key, part.index)


def part_name(job_key: str, index: int) -> str:
    """Of its object in the folder."""
    return f"part-{job_key}-{index:08d}.jsonl"
