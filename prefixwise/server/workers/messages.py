"""What HTTP workers and the engine process say to each other over ZeroMQ. No pickles: a message cannot run code.

    [kind, header]           a msgspec struct of scalars, as MessagePack
    [kind, header, arrays]   the header has dtype and shape of every array, the third frame their bytes

Frozen dataclasses of the engine (`ScoringTask`, `BackendInfo`, ...) travel as they are: the annotations of their fields
are the schema, and the receiver checks every value against it. Deadlines are values of time.monotonic(), a clock that
all processes of one machine share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefixwise.contract import errors
from prefixwise.contract.errors import BackendError, PrefixwiseError, RequestError, ServiceError
from prefixwise.engine.health import EngineState
from prefixwise.engine.loras import LoadedLora
from prefixwise.engine.prefix_cache import PinnedPrefix
from prefixwise.engine.request_state import BatchRecord, ScoringTask
from prefixwise.engine.scheduler import SchedulerOptions
from prefixwise.engine.stats import EngineStats
from prefixwise.forward.backend import BackendInfo
from prefixwise.models.config import ModelConfig
from prefixwise.plan.cost_model import CostModel

Header = TypeVar("Header")

# Kinds, from a worker to the engine ...
HELLO, SUBMIT, CANCEL, QUERY, FULL, KNOWN = b"hello", b"submit", b"cancel", b"query", b"full", b"known"
# ... and back.
DESCRIPTION, REFUSED, DONE, ANSWER, NEWS = b"description", b"refused", b"done", b"answer", b"news"

_ALIGNMENT = 8  # bytes, of every array in the third frame
_DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.int32, np.int64, np.float32)}
_PADDING = tuple(bytes(size) for size in range(_ALIGNMENT))


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """An error, as another process raises it."""

    name: str  # of its class
    message: str
    code: str = ""
    param: str | None = None
    item_index: int | None = None
    retry_after: int | None = None


class Submission(msgspec.Struct, array_like=True, frozen=True):
    """Requests that are queued together or not at all. Each has a number that its worker has not used before."""

    ids: tuple[int, ...]
    tasks: tuple[ScoringTask, ...]


class SubmissionIds(msgspec.Struct, array_like=True, frozen=True):
    """The numbers of a submission whose tasks cannot be read."""

    ids: tuple[int, ...]


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A submission that was not queued."""

    ids: tuple[int, ...] | None  # None: every request of the worker, as nobody knows which one it was
    fault: Fault


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """A request that is done: the fields of `RequestState` that its caller reads."""

    id: int
    fault: Fault | None
    cached_tokens: int
    started: float | None
    prefill_seconds: float
    extend_seconds: float
    pinned: PinnedPrefix | None = None
    batches: tuple[BatchRecord, ...] = ()  # where the request asks for a debug block
    label_logits: NDArray[np.float32] | None = None
    logsumexp: NDArray[np.float32] | None = None
    hidden: NDArray[np.float32] | None = None
    top_logits: NDArray[np.float32] | None = None  # where the request asks for the most likely tokens
    top_ids: NDArray[np.int32] | None = None


class LoraUpdate(msgspec.Struct, array_like=True, frozen=True):
    """Load an adapter or, without a path, unload it."""

    name: str
    path: str | None = None
    in_place: bool = False


class Query(msgspec.Struct, array_like=True, frozen=True):
    """Asks for a snapshot, or to unpin a prefix, or to load or unload a LoRA adapter."""

    id: int
    unpin: str | None = None
    lora: LoraUpdate | None = None


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """What the engine process knows about itself."""

    stats: EngineStats
    pins: tuple[PinnedPrefix, ...]
    device_memory: dict[str, int]
    num_compilations: int
    peak_host_bytes: int
    loras: tuple[LoadedLora, ...] = ()


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The answer to a query."""

    id: int
    snapshot: Snapshot
    was_pinned: bool = False  # the prefix that the query names
    fault: Fault | None = None  # why a LoRA adapter was not loaded or unloaded


class Description(msgspec.Struct, array_like=True, frozen=True):
    """What a worker must know of the engine to prepare requests. Weights never leave the engine process."""

    model_name: str
    revision: str | None
    model: ModelConfig
    backend: BackendInfo
    scheduler: SchedulerOptions
    costs: CostModel  # of this machine; later steps change their scale alone, and no choice depends on that
    max_queued_tokens: int
    configuration: dict[str, Any]  # resolved, as plain JSON
    versions: dict[str, str]  # of the packages that the engine process has loaded
    snapshot: Snapshot


class News(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state has changed."""

    state: EngineState
    reason: str | None
    full: Fault | None  # no request would be queued now
    loras: tuple[LoadedLora, ...] = ()
    loras_version: int = 0  # how often they have changed; a worker says that it knows them (KNOWN)


class Packer:
    """Encodes headers and the arrays in them. One thread uses it."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []
        self._numbers: dict[int, int] = {}  # of arrays by identity: a prefix is in a task and in its plan
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def pack(self, kind: bytes, header: object) -> list[bytes]:
        """The frames of a message."""
        self._arrays, self._numbers = [], {}
        packed = self._encoder.encode(header)
        if not self._arrays:
            return [kind, packed]
        pieces: list[Any] = []
        for array in self._arrays:
            pieces += (array, _PADDING[-array.nbytes % _ALIGNMENT])
        return [kind, packed, b"".join(pieces)]

    def _encode_array(self, value: object) -> tuple[int, str, tuple[int, ...]]:
        """Number, dtype and shape."""
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a message has scalars, dataclasses and arrays, got {type(value).__name__}")
        if value.dtype.str not in _DTYPES:
            raise TypeError(f"an array of a message is one of {', '.join(_DTYPES)}, got {value.dtype}")
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._arrays)
            self._arrays.append(np.ascontiguousarray(value))
        return number, value.dtype.str, value.shape


class Unpacker(Generic[Header]):
    """Decodes headers of one type, whose arrays become read-only views of the third frame. One thread uses it."""

    def __init__(self, header: type[Header]) -> None:
        self._buffer: Any = b""
        self._begins: list[int] = []  # where the arrays seen so far begin, and the next one
        self._decoder = msgspec.msgpack.Decoder(header, dec_hook=self._decode_array)

    def unpack(self, frames: Sequence[Any]) -> Header:
        """`frames`: those after the kind. Raises msgspec.ValidationError for a header of another type."""
        self._buffer, self._begins = (frames[1] if len(frames) > 1 else b""), [0]
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._buffer = b""

    def _decode_array(self, kind: object, value: tuple[int, str, list[int]]) -> NDArray[Any]:
        number, name, shape = value
        dtype, count = _DTYPES[name], math.prod(shape)
        if number == len(self._begins) - 1:
            size = count * dtype.itemsize
            self._begins.append(self._begins[-1] + size + -size % _ALIGNMENT)
        return np.frombuffer(self._buffer, dtype, count, self._begins[number]).reshape(shape)


# Errors

_CLASSES: Mapping[str, type[PrefixwiseError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PrefixwiseError)
}


def fault_of(error: BaseException) -> Fault:
    """The error for another process. What is not ours stays in this process's log: its text is for nobody else."""
    name = type(error).__name__
    if isinstance(error, RequestError):
        retry_after = error.retry_after if isinstance(error, ServiceError) else None
        return Fault(name, error.message, error.code, error.param, error.item_index, retry_after)
    if isinstance(error, PrefixwiseError):
        return Fault(name if name in _CLASSES else BackendError.__name__, str(error))
    return Fault(BackendError.__name__, f"the engine failed with {name}; its log says more")


def error_of(fault: Fault) -> PrefixwiseError:
    """The error that another process has met."""
    kind = _CLASSES[fault.name]
    error = kind.__new__(kind, fault.message)
    if not isinstance(error, RequestError):
        return error
    error.message, error.code, error.param = fault.message, fault.code, fault.param
    error.item_index = fault.item_index
    if isinstance(error, ServiceError) and fault.retry_after is not None:
        error.retry_after = fault.retry_after
    return error
