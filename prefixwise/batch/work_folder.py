"""The work folder of a job, OUTPUT.parts/: its manifest and its completed parts, until the output is written.

    manifest.json                      what the job is
    part-1f0c2b9a77de-00000000.jsonl   all rows of the job's first part in order, with their scores or errors
    NAME.1f0c2b9a.tmp                  a file that is being written

The letters in a part's name are the job's key, so the parts of two jobs with the same output never mix. A part's file
is complete or absent, and its rows are counted before it is used.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwise.batch.manifest import Manifest
from prefixwise.batch.parts import Part, PartRecord
from prefixwise.batch.storage import file_errors, list_names, open_file, read_bytes, remove_files, write_file
from prefixwise.contract.errors import BatchError

_MANIFEST, _RUN = "manifest.json", "run"
_PART_FILE = re.compile(r"part-[0-9a-f]{12}-\d{8}\.jsonl")
_JOB_FILES = re.compile(rf"{re.escape(_MANIFEST)}|{_PART_FILE.pattern}|.*\.[0-9a-f]{{8}}\.tmp")


@dataclass(frozen=True)
class RowResult:
    """The outcome of a row: a line of its part's file, and later a row of the output or of the error file."""

    line: int
    id: object  # None where the row has none
    outcome: Mapping[str, Any]  # scores, results, or error
    warnings: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return "error" in self.outcome

    @property
    def num_items(self) -> int:
        return num_scored(self.outcome)

    def to_json(self) -> dict[str, object]:
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.line, **named, **self.outcome}


OnResult = Callable[[RowResult], None]


def num_scored(row: Mapping[str, Any]) -> int:
    """Items or documents of a row that have scores."""
    return sum(scores is not None for scores in row.get("scores") or row.get("results") or ())


def part_name(job_key: str, index: int) -> str:
    """The name of a part's file."""
    return f"part-{job_key}-{index:08d}.jsonl"


@dataclass(frozen=True)
class PartStore:
    """The completed parts of one job. Plain values, so it can be sent to workers."""

    folder: str  # a URL that every worker reaches
    job_key: str

    def write(self, part: Part, results: Sequence[RowResult]) -> None:
        """Raises BatchError."""
        lines = [json.dumps(result.to_json(), ensure_ascii=True, allow_nan=False) + "\n" for result in results]
        write_file(self._url_of(part), "".join(lines).encode())

    def read(self, part: Part) -> Iterator[dict[str, Any]]:
        """The part's rows in order. Raises BatchError where its file is damaged."""
        url = self._url_of(part)
        with file_errors(url), open_file(url) as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise BatchError(f"{url} is damaged: {error}; remove it, and --resume") from None

    def complete(self, parts: Sequence[Part]) -> list[PartRecord]:
        """The parts whose file has all rows; a damaged file counts as missing."""
        names = set(list_names(self.folder))
        written = [part for part in parts if part_name(self.job_key, part.index) in names]
        counts = [(part, self._count(part)) for part in written]
        return [record for part, record in counts if record is not None and record.num_rows == part.num_rows]

    def _count(self, part: Part) -> PartRecord | None:
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
        return f"{self.folder}/{part_name(self.job_key, part.index)}"


@dataclass(frozen=True)
class WorkFolder:
    """The folder itself; it may not exist yet."""

    url: str

    def has_manifest(self) -> bool:
        return _MANIFEST in list_names(self.url)

    def read_manifest(self) -> Manifest:
        """Raises BatchError where there is none."""
        url = f"{self.url}/{_MANIFEST}"
        return Manifest.from_json(read_bytes(url), url)

    def write_manifest(self, manifest: Manifest) -> str:
        """Returns the id of this run, which is the job's latest from now on."""
        run = secrets.token_hex(8)
        write_file(f"{self.url}/{_MANIFEST}", json.dumps({**json.loads(manifest.to_json()), _RUN: run}).encode())
        return run

    def parts_of(self, manifest: Manifest) -> PartStore:
        return PartStore(self.url, manifest.key)

    def check_is_of(self, manifest: Manifest) -> None:
        """Raises BatchError where another job has begun with the same output."""
        if not self.has_manifest() or self.read_manifest().key != manifest.key:
            raise BatchError(f"{self.url}: expected this job's manifest, got another's or none: another job was begun")

    def remove_without_parts(self, run: str) -> bool:
        """Remove the folder if it holds no complete part, and no other run has taken it since. Returns whether it has.
        Raises BatchError."""
        names = list_names(self.url)
        if _MANIFEST not in names or any(_PART_FILE.fullmatch(name) for name in names):
            return False
        if json.loads(read_bytes(f"{self.url}/{_MANIFEST}")).get(_RUN) != run:
            return False
        self._remove_files_of_jobs(names)
        return True

    def remove(self) -> None:
        """Remove the files of jobs, and the folder if it is empty then."""
        self._remove_files_of_jobs(list_names(self.url))

    def _remove_files_of_jobs(self, names: Sequence[str]) -> None:
        remove_files(self.url, [name for name in names if _JOB_FILES.fullmatch(name)])
