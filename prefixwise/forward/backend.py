"""The backend interface: a model on a device that runs forwards, and what the engine may know about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, ForwardOutput, RunningForward
from prefixwise.models.config import ModelConfig

DeviceKind = Literal["cpu", "gpu", "tpu"]
Warmup = Literal["full", "fast", "none"]

# Most tokens in one forward, where the user leaves it open.
DEFAULT_TOKEN_BUDGETS: dict[DeviceKind, int] = {"cpu": 16_384, "gpu": 65_536, "tpu": 32_768}


@dataclass(frozen=True)
class BackendOptions:
    """Which backend, where, how exact, and what it prepares before the first request."""

    backend: str = "auto"  # auto, jax, torch
    device: str = "auto"  # auto, cpu, cuda, gpu, tpu, or one of them with a number: cuda:1
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    tp_size: int = 1  # devices that share every layer
    dp_size: int = 1  # copies of the model
    batch_invariant: bool = False
    token_budget: int | None = None  # most tokens in one forward; None: the device's default
    attention: str | None = None  # the name of an implementation; None: the best that runs
    # Memory for the keys and values of prefixes, on each device; None: chosen for the device.
    prefix_cache_bytes: int | None = None
    compilation_cache_dir: str | None = None  # JAX only; None: the user's cache folder, on accelerators
    weight_cache: bool = True  # keep the weights of quantised files on disk as bfloat16, where they are loaded as that
    warmup: Warmup = "none"  # `fast` has fewer, coarser sizes of programs, so that there are fewer to compile

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise BackendError(f"{name} must be a whole number of at least 1, got {size!r}")
        if self.warmup not in get_args(Warmup):
            raise BackendError(f"warmup must be one of {', '.join(get_args(Warmup))}, got {self.warmup!r}")


@dataclass(frozen=True)
class BackendInfo:
    """What the planner may know about a backend."""

    name: str  # "torch", "jax", "fake"
    device: str  # "cpu", "cuda:0 (NVIDIA H200)"
    device_kind: DeviceKind
    dtype: str  # of the weights
    # Do serial, packed and prefill_extend give the same bits here? Then `auto` may look at the number of items.
    algorithms_bit_equal: bool
    token_multiple: int  # forwards are padded to a multiple of this many tokens
    token_budget: int = DEFAULT_TOKEN_BUDGETS["cpu"]  # most tokens in one forward
    token_buckets: tuple[int, ...] = ()  # or to one of these sizes, where only they were compiled
    num_copies: int = 1  # of the model, which share out the items of an extend forward, and the rows of the others
    num_kv_blocks: int = 1 << 20  # how many blocks of prefixes can be kept at a time
    kv_block_bytes: int = 0  # what one of them takes on each device
    max_kv_blocks_read: int | None = None  # by one forward, a block counted for every prefix that has it; None: any
    attention: str = "none"  # the implementation that was chosen
    compute_dtype: str | None = None  # of activations, GEMMs and the KV cache; None: that of the weights
    compilation_cache_dir: str | None = None  # where compiled programs are kept, if they are
    step_tokens: int = 2048  # how many tokens one forward should have: enough to use the device well, soon done
    # Shall one forward keep blocks of prefixes and score tails, which may read them, rather than two? That pays where a
    # forward's launches take long, and where products of few rows do not use the device.
    joins_prefill: bool = False
    # Does the device work by itself once a forward is started? Then the next step may be started before it is done, and
    # another thread than the device's own may call `wait`.
    async_scheduling: bool = False

    @property
    def max_prefix_len(self) -> int:
        """The longest prefix that can be kept between forwards."""
        return self.num_kv_blocks * KV_BLOCK_SIZE


@dataclass(frozen=True)
class Program:
    """Something that is compiled once. Both functions are for the thread that owns the device."""

    title: str
    # Do what comes before compiling. What it returns compiles the program, on any thread, beside others. None: to
    # prepare it is all there is to do.
    lower: Callable[[], Callable[[], None]] | None
    prepare: Callable[[], object]  # run it once; it is compiled first where it was not


class Backend(ABC):
    """A model on a device."""

    config: ModelConfig
    info: BackendInfo

    @abstractmethod
    def start(self, batch: ForwardBatch) -> RunningForward:
        """Begin one forward pass; on an accelerator it goes on while the host prepares the next.

        A segment's numbers depend on its own tokens and on those of its prefix that it reads, bit for bit.
        Forwards run in the order in which they are started. Raises BackendError where blocks to be kept do not fit.
        """

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward pass, and wait for it."""
        return self.start(batch).wait()

    def programs(self, *, max_dense_row_len: int) -> Sequence[Program]:
        """All that any forward can need; none for a backend that compiles nothing.

        `max_dense_row_len`: the longest row of a packed forward with a dense mask; 0 where there are none.
        """
        return ()

    def synchronize(self) -> None:  # noqa: B027  # a backend whose forwards return when they are done need not say so
        """Return when the device has done all that it was given. A forward that only keeps prefixes may run on."""

    def memory_stats(self) -> Mapping[str, int]:
        """Bytes on its devices by name, `peak_bytes` among them where that is known; nothing on a CPU."""
        return {}

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return 0

    def close(self) -> None:  # noqa: B027  # a backend that holds nothing need not say so
        """Give the device's memory back."""
