"""The weight cache: a quantised checkpoint's matrices in bfloat16 on disk, made on first use.

Dequantising takes longer than the rest of a start. So all cores do it once, into a safetensors file that later starts
map. The file holds exactly the bits that a backend would round the dequantised numbers to.

A file has the identity of its source in its name and in its header. It gets its name when it is complete and on disk,
so readers see all of it or nothing, however many processes start at once. A damaged or foreign file is made again.
Where nothing can be written, weights are dequantised on every read.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from prefixwise.contract.errors import ModelLoadError
from prefixwise.host import user_cache_folder
from prefixwise.models.checkpoint import Checkpoint, StoredTensor
from prefixwise.models.safetensors import (
    bfloat16_file_bytes,
    open_safetensors,
    read_safetensors_metadata,
    write_bfloat16_safetensors,
)

log = logging.getLogger("prefixwise")

WEIGHT_CACHE_VARIABLE = "PREFIXWISE_WEIGHT_CACHE"
OFF = "off"
_FORMAT = "1"  # goes up when the same source would give other bytes
_LEAST_FREE_SHARE = 0.5  # of the disk's free space that is left to others


@dataclass(frozen=True)
class _Entry:
    """The file of one checkpoint; it may not exist yet."""

    path: Path
    metadata: dict[str, str]  # in its header
    sources: Mapping[str, StoredTensor]  # by canonical name: the quantised tensors

    @classmethod
    def of(cls, checkpoint: Checkpoint, folder: Path) -> _Entry:
        source = checkpoint.path.resolve()
        status = source.stat()
        metadata = {
            "source": str(source),
            "source_bytes": str(status.st_size),
            "source_mtime_ns": str(status.st_mtime_ns),
            "prefixwise_format": _FORMAT,
        }
        digest = sha256("\n".join(metadata.values()).encode(errors="surrogateescape")).hexdigest()[:16]
        sources = {name: checkpoint.tensors[name] for name in sorted(checkpoint.quantised)}
        return cls(folder / f"{source.stem}-{digest}.safetensors", metadata, sources)

    def read(self) -> dict[str, StoredTensor] | None:
        """The mapped tensors; None where the file is missing, damaged or of another source."""
        try:
            if read_safetensors_metadata(self.path) != self.metadata:
                return None
            tensors = open_safetensors(self.path)
        except (OSError, ModelLoadError):
            return None
        expected = {name: tensor.shape for name, tensor in self.sources.items()}
        found = {name: tensor.shape for name, tensor in tensors.items() if tensor.dtype == "bfloat16"}
        return tensors if found == expected else None

    def write(self) -> None:
        """Dequantise into the file. Raises OSError where the disk is too full or cannot be written."""
        num_bytes = bfloat16_file_bytes(self.sources)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if num_bytes > (1 - _LEAST_FREE_SHARE) * free:
            raise OSError(f"{num_bytes >> 20} MB are needed in {self.path.parent}, where {free >> 20} MB are free")
        write_bfloat16_safetensors(self.path, self.sources, self.metadata)
        # A warning, because it uses disk space; it is logged once per model.
        log.warning(
            "wrote %d MB to %s, so that the next start is quicker; turn off with --no-weight-cache or %s=%s",
            *(num_bytes >> 20, self.path, WEIGHT_CACHE_VARIABLE, OFF),
        )


def with_bfloat16_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its quantised tensors in bfloat16 from the cache, which is filled on first use.

    Returns the checkpoint unchanged where nothing is quantised, the cache is off, or it cannot be written. Only for
    backends that compute in bfloat16.
    """
    folder = weight_cache_folder()
    if folder is None or not checkpoint.quantised:
        return checkpoint
    try:
        entry = _Entry.of(checkpoint, folder)
        tensors = entry.read()
        if tensors is None:
            entry.write()
            tensors = entry.read()
    except OSError as error:
        log.warning("dequantised weights are not cached: %s", error)
        return checkpoint
    if tensors is None:  # another process changed the folder meanwhile
        return checkpoint
    return replace(checkpoint, tensors={**checkpoint.tensors, **tensors}, quantised=frozenset())


def weight_cache_folder() -> Path | None:
    """The cache's folder; None where the environment turns the cache off."""
    setting = os.environ.get(WEIGHT_CACHE_VARIABLE)
    if setting == OFF:
        return None
    return Path(setting).expanduser() if setting else user_cache_folder() / "prefixwise" / "weights"
