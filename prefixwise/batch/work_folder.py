"""The folder beside the output in which a job keeps what it has until it ends: OUTPUT.parts/.

manifest.json        what the job is
part-...             parts that are done: see part_store.py
NAME.1f0c2b9a.tmp    what is being written
"""

from __future__ import annotations

import re

from prefixwise.batch.manifest import Manifest
from prefixwise.batch.part_store import PART_NAME, PartStore
from prefixwise.batch.storage import list_names, read_bytes, remove_files, write_whole
from prefixwise.contract.errors import BatchError

_MANIFEST = "manifest.json"
_OURS = re.compile(rf"{re.escape(_MANIFEST)}|{PART_NAME.pattern}|.*\.[0-9a-f]{{8}}\.tmp")


class WorkFolder:
    """By its URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def has_manifest(self) -> bool:
        return _MANIFEST in list_names(self.url)

    def read_manifest(self) -> Manifest:
        """Raises BatchError where there is none."""
        url = f"{self.url}/{_MANIFEST}"
        return Manifest.from_json(read_bytes(url), url)

    def write_manifest(self, manifest: Manifest) -> None:
        write_whole(f"{self.url}/{_MANIFEST}", manifest.to_json())

    def parts_of(self, manifest: Manifest) -> PartStore:
        return PartStore(self.url, manifest.key)

    def check_is_of(self, manifest: Manifest) -> None:
        """Raises BatchError where another job has been begun at the same output since."""
        if not self.has_manifest() or self.read_manifest().key != manifest.key:
            raise BatchError(f"{self.url}: expected this job's manifest, got another's or none: another job was begun")

    def remove(self) -> None:
        """What a job has made, and the folder where nothing else is in it."""
        remove_files(self.url, [name for name in list_names(self.url) if _OURS.fullmatch(name)])
