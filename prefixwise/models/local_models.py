"""What is on this machine already: the embedded model and the Hugging Face cache, for `prefixwise models`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import open_checkpoint
from prefixwise.models.embedded import embedded_model_path

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

_EMBEDDED_NOTE = "embedded: used when no model is named"


@dataclass(frozen=True)
class LocalModel:
    """One line of the list."""

    name: str
    family: str | None  # None: it cannot be opened, and `note` says why
    path: Path | None  # what to open; None where there is nothing yet
    size_bytes: int
    note: str


def find_local_models(cache_folder: Path | None = None) -> list[LocalModel]:
    """The embedded model first, then the cache (`HF_HOME` and its kin say where it is) by name."""
    return [_embedded(), *sorted(_cached(cache_folder), key=lambda model: model.name)]


def _embedded() -> LocalModel:
    try:
        path = embedded_model_path()
    except ModelLoadError as error:
        return LocalModel("SmolLM2-135M-Instruct", None, None, 0, str(error))
    return _describe(path.stem, path, path.stat().st_size, _EMBEDDED_NOTE)


def _cached(cache_folder: Path | None) -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache_folder).repos
    except CacheNotFound:  # nothing was ever downloaded
        return
    for repo in repos:
        if repo.repo_type == "model" and repo.revisions:
            yield from _models_of(repo.repo_id, _current_revision(repo))


def _current_revision(repo: CachedRepoInfo) -> CachedRevisionInfo:
    """What the id stands for: `main` where it is there, else the newest."""
    return max(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))


def _models_of(repo_id: str, revision: CachedRevisionInfo) -> Iterator[LocalModel]:
    """A repository is one model, or as many as it has GGUF files."""
    gguf_files = [file for file in revision.files if file.file_name.endswith(".gguf")]
    if not gguf_files:
        yield _describe(repo_id, revision.snapshot_path, revision.size_on_disk, "")
    for file in gguf_files:
        yield _describe(f"{repo_id}: {file.file_name}", file.file_path, file.size_on_disk, "")


def _describe(name: str, path: Path, size_bytes: int, note: str) -> LocalModel:
    try:
        family = open_checkpoint(path).config.family
    except ModelLoadError as error:
        return LocalModel(name, None, path, size_bytes, str(error))
    return LocalModel(name, family, path, size_bytes, note)
