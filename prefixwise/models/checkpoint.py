"""Opening a checkpoint: from a name or a path to a `Checkpoint` that backends read, tensor by tensor.

Nothing is read into memory here but headers. A backend asks for rows of one tensor at a time, so loading
never holds a second copy of the model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.config import ModelConfig, parameter_shapes

if TYPE_CHECKING:
    from prefixwise.models.tokenizer_files import TokenizerFiles

StoredDtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class StoredTensor(ABC):
    """One tensor of a checkpoint, still on disk."""

    shape: tuple[int, ...]
    dtype: StoredDtype

    @abstractmethod
    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop along the first axis, [stop - start, ...]: float32 or float16 numbers, or, for
        `bfloat16`, which numpy does not have, their bits as uint16. May be a read-only view of the file,
        which stays mapped for as long as the array lives: copy it and let it go."""


def as_float32(rows: NDArray[Any], dtype: StoredDtype) -> NDArray[np.float32]:
    """What `read_rows` gives, as numbers."""
    if dtype == "bfloat16":  # its bits are the upper half of a float32's
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(rows, np.float32)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its description, its tensors by canonical name, and where its tokenizer is."""

    name: str
    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    read_tokenizer_files: Callable[[], TokenizerFiles]  # raises TokenizerError when there is none
    names: tuple[str, ...] = ()  # all by which the model may be recognised (`names_of`), the one that was given first
    quantised: frozenset[str] = frozenset()  # the matrices whose rows are dequantised, which takes time, when read


def open_checkpoint(model: str | Path | None = None) -> Checkpoint:
    """Open a folder in Hugging Face's layout, a `.gguf` file, a hub id, or (None) the embedded model."""
    if model is None:
        from prefixwise.models.embedded import embedded_model_path

        return open_checkpoint(embedded_model_path())
    if not str(model):
        raise ModelLoadError("the model must be a folder, a .gguf file or a hub id, got an empty name")
    path = Path(model).expanduser()
    if path.is_file():
        return _open_file(path, str(model))
    if path.is_dir():
        return _open_folder(path, str(model))
    if _looks_like_hub_id(str(model)):
        from prefixwise.models.hub import download

        return _open_folder(download(str(model)), str(model))
    raise ModelLoadError(
        f"no model at {str(model)!r}: expected a folder, a .gguf file or a hub id like Qwen/Qwen3-0.6B"
    )


def _looks_like_hub_id(name: str) -> bool:
    owner, slash, repo = name.partition("/")
    return bool(slash and owner and repo) and "/" not in repo and not name.startswith((".", "~"))


def _open_file(path: Path, name: str) -> Checkpoint:
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is a file; expected a .gguf file, or the folder that holds config.json")
    from prefixwise.models.gguf import open_gguf

    return open_gguf(path, name)


def _open_folder(path: Path, name: str) -> Checkpoint:
    from prefixwise.models.hf_folder import open_hf_folder

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


def names_of(given: str, path: Path, *said: object) -> tuple[str, ...]:
    """The name that was given, the folder's or the file's own (less its suffix), the hub's where the path is in its
    cache, and what the files themselves say, if it is text."""
    place = path.absolute()
    own_name = place.stem if place.suffix == ".gguf" else place.name
    found = [given, own_name, _hub_name(place), *said]
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str) and name))


def _hub_name(path: Path) -> str | None:
    """`.../models--owner--name/snapshots/<revision>/...` to `owner/name`."""
    for folder in path.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return folder.parent.name.removeprefix("models--").replace("--", "/")
    return None


def check_layer_count(config: ModelConfig, stored: Iterable[str], layer_prefix: str) -> None:
    """Raise where the file holds more or fewer layers than the description promises."""
    found = re.compile(rf"{re.escape(layer_prefix)}\.(\d+)\.").match
    numbers = [int(match[1]) for match in map(found, stored) if match]
    num_stored = max(numbers, default=-1) + 1
    if num_stored != config.num_layers:
        raise ModelLoadError(f"the config asks for {config.num_layers} layers, but the checkpoint holds {num_stored}")


def check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor], file_names: Mapping[str, str]) -> None:
    """Raise for the first parameter that is missing or has another shape than the description promises."""
    for name, expected in parameter_shapes(config).items():
        if name not in tensors:
            raise ModelLoadError(f"the checkpoint lacks the tensor {file_names[name]!r} of shape {list(expected)}")
        got = tensors[name].shape
        if got != expected:
            raise ModelLoadError(
                f"the tensor {file_names[name]!r} has shape {list(got)}, but the config asks for {list(expected)}"
            )


def check_nothing_left(
    config: ModelConfig, stored: Iterable[str], file_names: Mapping[str, str], layer_prefix: str
) -> None:
    """Raise for a tensor of a layer that we would not use: without it the scores are wrong, in silence."""
    used = set(file_names.values())
    for name in stored:
        if name.startswith(f"{layer_prefix}.") and name not in used and not name.endswith("rotary_emb.inv_freq"):
            raise ModelLoadError(
                f"unsupported: the checkpoint has the tensor {name!r}, which {config.family} does not use"
            )
