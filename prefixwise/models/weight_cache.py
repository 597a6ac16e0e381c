"""Dequantised weights, kept on disk: a quantised checkpoint's matrices in bfloat16, made on first use.

Dequantising takes longer than all else in a start. So it is done once, by all cores, into a safetensors file that
later starts map. The file holds exactly the bits that a backend would round the dequantised numbers to.

A file has the identity of its source in its name and in its header. It is written beside its place and renamed when it
is whole and on disk, so whoever reads sees all of it or nothing, however many processes start at once. One that cannot
be used, for whatever reason, is made again; and where nothing can be written, weights are dequantised as they are read.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.cache_folder import OFF, WEIGHT_CACHE_VARIABLE, weight_cache_folder
from prefixwise.models.checkpoint import Checkpoint, StoredTensor
from prefixwise.models.safetensors_file import open_safetensors, read_safetensors_metadata
from prefixwise.models.safetensors_writer import bfloat16_file_bytes, write_bfloat16_safetensors

log = logging.getLogger("prefixwise")

_FORMAT = "1"  # goes up when the same source would give other bytes
_LEAST_FREE_SHARE = 0.5  # of the disk's free space that is left to others


@dataclass(frozen=True)
class _Entry:
    """The file of one checkpoint, whether it is there or not."""

    path: Path
    metadata: dict[str, str]  # in its header
    sources: Mapping[str, StoredTensor]  # by canonical name: what is dequantised into it

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
        """The mapped tensors; None where the file is missing, damaged or another's."""
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
        """Raises OSError where that cannot be done."""
        num_bytes = bfloat16_file_bytes(self.sources)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if num_bytes > (1 - _LEAST_FREE_SHARE) * free:
            raise OSError(f"{num_bytes >> 20} MB are needed in {self.path.parent}, where {free >> 20} MB are free")
        write_bfloat16_safetensors(self.path, self.sources, self.metadata)
        # Said as loudly as a warning, because it is said once: a disk has become fuller.
        log.warning(
            "wrote %d MB to %s, so that the next start is quicker; turn off with --no-weight-cache or %s=%s",
            *(num_bytes >> 20, self.path, WEIGHT_CACHE_VARIABLE, OFF),
        )


def with_bfloat16_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its quantised tensors in bfloat16, from the cache, which is filled where it has to be; as it
    is where there is nothing to gain or nothing can be kept. For who loads it in bfloat16 anyhow."""
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
        log.warning("dequantised weights are not kept: %s", error)
        return checkpoint
    if tensors is None:  # somebody changes the folder under our hands
        return checkpoint
    return replace(checkpoint, tensors={**checkpoint.tensors, **tensors}, quantised=frozenset())
