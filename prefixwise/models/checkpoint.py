"""A checkpoint as backends read it: a description, and tensors that are read row by row.

`sources.py` opens one. The readers (`gguf.py`, `hf_folder.py`) know this module and never each other. Opening reads
headers only: a backend then asks for rows of one tensor at a time, so loading never holds a second copy of the model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from prefixwise.contract.errors import ModelLoadError, PrefixwiseError
from prefixwise.models.config import ModelConfig, parameter_shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NumberDtype = Literal["float32", "float16", "bfloat16"]
CodeDtype = Literal["float8_e4m3fn", "uint8", "int8", "int32", "int64"]  # of quantised weights, and of their shapes
StoredDtype = NumberDtype | CodeDtype
NUMBER_DTYPES: tuple[StoredDtype, ...] = get_args(NumberDtype)


@dataclass(frozen=True)
class StoredTensor(ABC):
    """One tensor of a checkpoint, still on disk."""

    shape: tuple[int, ...]
    dtype: StoredDtype

    @abstractmethod
    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop along the first axis, [stop - start, ...], in the dtype, or the bits of what numpy does not
        have: uint16 for `bfloat16`, uint8 for `float8_e4m3fn`. The array may be a read-only view of the file, which
        stays mapped as long as the array lives: copy it and release it."""


def map_rows(path: Path, offset: int, dtype: DTypeLike, shape: tuple[int, ...], start: int, stop: int) -> NDArray[Any]:
    """Map rows start..stop, read-only, of the tensor of this shape whose first byte is at `offset`.

    Every call makes its own mapping. One mapping of the whole file would stay resident page by page while a backend
    copies tensor after tensor, and loading would take twice the model's memory.
    """
    start, stop, _ = slice(start, stop).indices(shape[0])
    rows_shape = (max(0, stop - start), *shape[1:])
    if 0 in rows_shape:  # mmap refuses an empty range
        return np.empty(rows_shape, dtype)
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape[1:]))
    return np.asarray(np.memmap(path, dtype, "r", offset + start * row_bytes, rows_shape))


@dataclass(frozen=True, eq=False)
class ChosenRows(StoredTensor):
    """Rows of another stored tensor, in any order."""

    stored: StoredTensor
    order: NDArray[np.int64]  # which stored row is row i

    @classmethod
    def of(cls, stored: StoredTensor, order: NDArray[np.int64]) -> ChosenRows:
        return cls((len(order), *stored.shape[1:]), stored.dtype, stored, order)

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        order = self.order[start:stop]
        if not len(order):
            return self.stored.read_rows(0, 0)
        first, last = int(order.min()), int(order.max())
        rows = self.stored.read_rows(first, last + 1)
        return rows if np.array_equal(order, np.arange(first, last + 1)) else rows[order - first]


def split_rows(
    stored: Mapping[str, StoredTensor], fused_name: str, parts: Mapping[str, int]
) -> dict[str, StoredTensor]:
    """The tensors with those whose names end in `fused_name` cut into parts of so many rows, which end in these names.

    Raises ModelLoadError for a tensor of another number of rows.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if not name.endswith(fused_name):
            found[name] = tensor
            continue
        if tensor.shape[0] != sum(parts.values()):
            raise ModelLoadError(
                f"the tensor {name!r} has {tensor.shape[0]} rows, but the config asks for {sum(parts.values())}"
            )
        start = 0
        for part, num_rows in parts.items():
            order = np.arange(start, start + num_rows)
            found[name.removesuffix(fused_name) + part] = ChosenRows.of(tensor, order)
            start += num_rows
    return found


def with_rotary_halves(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The parameters of a model that rotates only the first numbers of each head, with the rows of Q and K in another
    order: number i is rotated with number H / 2 + i, as in models that rotate all, and those behind `rotary_size` have
    a frequency of 0. Scores do not change."""
    if config.rope.rotary_size is None:
        return dict(tensors)

    def reorder(key: str, tensor: StoredTensor) -> StoredTensor:
        if key.rpartition(".")[2] not in ("q", "k", "q_bias", "k_bias"):
            return tensor
        return ChosenRows.of(tensor, rotary_order(config, tensor.shape[0]))

    return {key: reorder(key, tensor) for key, tensor in tensors.items()}


def rotary_order(config: ModelConfig, num_rows: int) -> NDArray[np.int64]:
    """Which stored row is row i of Q or K (`with_rotary_halves`)."""
    half, rotated = config.head_size // 2, (config.rope.rotary_size or config.head_size) // 2
    rest = half - rotated
    first = np.r_[0:rotated, 2 * rotated : 2 * rotated + rest]
    second = np.r_[rotated : 2 * rotated, 2 * rotated + rest : config.head_size]
    heads = np.arange(num_rows // config.head_size)[:, None] * config.head_size
    order: NDArray[np.int64] = (heads + np.concatenate([first, second])).reshape(-1)
    return order


def as_float32(rows: NDArray[Any], dtype: StoredDtype) -> NDArray[np.float32]:
    """Convert what `read_rows` returns to numbers."""
    if dtype == "bfloat16":  # its bits are the upper half of a float32's
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(rows, np.float32)


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer, and the facts that it does not carry itself."""

    tokenizer: Tokenizer
    leading_ids: tuple[int, ...]  # special tokens before every prompt (BOS), usually none or one
    chat_template: str | None
    special_ids: frozenset[int]
    # Their texts by role, where known: bos_token, eos_token, unk_token, pad_token. Chat templates ask for them.
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    trailing_ids: tuple[int, ...] = ()  # special tokens after a whole text (EOS), none for most models


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores its weights, where they are quantised. They are dequantised while they are loaded."""

    title: str  # the method and its parameters, for logs and `/server_info`
    of_activations: bool = False  # it would quantise activations, too; we compute them in the model's dtype


@dataclass(frozen=True)
class LogitScore:
    """How sentence-transformers scores with a causal model: by the logit of a token, or by the difference of two."""

    true_token_id: int
    false_token_id: int | None = None
    instruction: str | None = None  # the default prompt, which the chat template gets as the system's message
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # that the chat template gets beside messages


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its description, its tensors by canonical name, and its tokenizer."""

    name: str
    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    read_tokenizer_files: Callable[
        [], TokenizerFiles
    ]  # raises TokenizerError when there is none, ModelLoadError when it is damaged
    names: tuple[str, ...] = ()  # all names that identify the model (`names_of`), the given one first
    quantised: frozenset[str] = frozenset()  # matrices that the weight cache keeps: dequantising them takes long
    quantization: Quantization | None = None
    logit_score: LogitScore | None = None  # of a reranker that sentence-transformers has saved

    @property
    def revision(self) -> str | None:
        """The commit of the hub's repository; None for a model that is not in the hub's cache."""
        snapshot = _hub_snapshot(self.path.absolute())
        return None if snapshot is None else snapshot.name


def names_of(given: str, path: Path, *stated: object) -> tuple[str, ...]:
    """The given name, the name of the folder or file (less its suffix), the hub id where the path is in the hub's
    cache, and the names that the files state, as far as they are text."""
    absolute = path.absolute()
    own_name = absolute.stem if absolute.suffix == ".gguf" else absolute.name
    found = [given, own_name, _hub_name(absolute), *stated]
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str) and name))


def _hub_name(path: Path) -> str | None:
    snapshot = _hub_snapshot(path)
    return None if snapshot is None else snapshot.parents[1].name.removeprefix("models--").replace("--", "/")


def _hub_snapshot(path: Path) -> Path | None:
    """The folder `.../models--owner--name/snapshots/<revision>` that the path is or lies in."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
            return folder
    return None


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Turn every failure to read the file into a ModelLoadError of one line that names it."""
    try:
        yield
    except ModelLoadError as error:
        if str(path) in str(error):
            raise
        raise ModelLoadError(f"{path}: {error}") from None
    except PrefixwiseError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"{path} cannot be read: {reason}") from None


def is_failure(error: BaseException) -> bool:
    """True for exceptions and for panics of Rust libraries, which are none; False for Ctrl-C and the like."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def check_layer_count(config: ModelConfig, stored: Iterable[str], layer_prefix: str) -> None:
    """Raise ModelLoadError where the file holds more or fewer layers than the config promises."""
    found = re.compile(rf"{re.escape(layer_prefix)}\.(\d+)\.").match
    numbers = [int(match[1]) for match in map(found, stored) if match]
    num_stored = max(numbers, default=-1) + 1
    if num_stored != config.num_layers:
        raise ModelLoadError(f"the config asks for {config.num_layers} layers, but the checkpoint holds {num_stored}")


def check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor], file_names: Mapping[str, str]) -> None:
    """Raise ModelLoadError for the first parameter that is missing or has another shape than the config promises."""
    for name, expected in parameter_shapes(config).items():
        if name not in tensors:
            raise ModelLoadError(f"the checkpoint lacks the tensor {file_names[name]!r} of shape {list(expected)}")
        got, dtype = tensors[name].shape, tensors[name].dtype
        if dtype not in NUMBER_DTYPES:
            raise ModelLoadError(
                f"the tensor {file_names[name]!r} is {dtype}; expected {', '.join(NUMBER_DTYPES)}, "
                "or codes and a quantization_config in config.json that says how to read them"
            )
        if got != expected:
            raise ModelLoadError(
                f"the tensor {file_names[name]!r} has shape {list(got)}, but the config asks for {list(expected)}"
            )


def check_no_unused_tensors(
    config: ModelConfig, stored: Iterable[str], file_names: Mapping[str, str], layer_prefix: str
) -> None:
    """Raise ModelLoadError for a layer's tensor that we would not use: the scores would be wrong without a sign."""
    used = set(file_names.values())
    for name in stored:
        if name.startswith(f"{layer_prefix}.") and name not in used and not name.endswith("rotary_emb.inv_freq"):
            raise ModelLoadError(
                f"unsupported: the checkpoint has the tensor {name!r}, which {config.family} does not use"
            )
