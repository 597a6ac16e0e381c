"""The backend interface: a model on a device that runs forwards, and the facts about it that the engine uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, ForwardOutput, KVBlock, Layout, RunningForward
from prefixwise.models.config import ModelConfig
from prefixwise.models.lora import LoraAdapter

DeviceKind = Literal["cpu", "gpu", "tpu"]
Warmup = Literal["full", "fast", "none"]
QuantizationName = Literal["fp8"]
KVCacheDtypeName = Literal["auto", "fp8", "fp8_e4m3"]  # the last two are the same
PrefixAttentionDtypeName = Literal["auto", "fp8"]

# Seconds that a step may take, and tokens that it may have in any case: every step reads the weights, which on a CPU
# takes as long as computing about 40 tokens. Whoever comes waits for the step that runs, and then for its own. On
# accelerators steps of large models take longer (`plan/cost_model.py`: tokens_of_step), and others where nobody would
# notice (`engine/step_limits.py`).
STEP_SECONDS: dict[DeviceKind, float | None] = {"cpu": 0.25, "gpu": 0.012, "tpu": 0.02}
LEAST_STEP_TOKENS = 256

_FLOAT32 = np.dtype(np.float32)

# Most tokens in one forward, unless the user sets it.
DEFAULT_TOKEN_BUDGETS: dict[DeviceKind, int] = {"cpu": 16_384, "gpu": 65_536, "tpu": 32_768}


@dataclass(frozen=True)
class BackendOptions:
    """Which backend, on which device, how exact, and how it warms up."""

    backend: str = "auto"  # auto, jax, torch
    device: str = "auto"  # auto, cpu, cuda, gpu, tpu, or one of them with a number: cuda:1
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    tp_size: int = 1  # devices that share every layer
    dp_size: int = 1  # copies of the model
    # Several hosts: one process on each, which share the model (JAX). `prefixwise serve` runs on all of them.
    nnodes: int = 1
    node_rank: int = 0  # of this process; 0 schedules and serves
    dist_init_addr: str | None = None  # host:port on rank 0, where the processes find each other
    batch_invariant: bool | None = None  # None: where it costs nothing
    quantization: str | None = None  # of the linear layers, while they are loaded: fp8
    kv_cache_dtype: str = "auto"  # auto: that of the arithmetic; fp8 and fp8_e4m3: half as many bytes
    prefix_attention_dtype: str = "auto"  # auto: that of the arithmetic; fp8: queries and keys in FP8
    token_budget: int | None = None  # most tokens in one forward; None: the device's default
    attention: str | None = None  # the name of an implementation; None: the fastest that runs
    # Memory for the KV cache, on each device; None: chosen for the device.
    prefix_cache_bytes: int | None = None
    compilation_cache_dir: str | None = None  # JAX only; None: the user's cache folder, on accelerators
    weight_cache: bool = True  # cache the weights of quantised files on disk as bfloat16, where they are loaded as that
    warmup: Warmup = "none"  # `fast` compiles fewer programs, with coarser buckets
    max_loras: int = 0  # slots for LoRA adapters; 0: none can be loaded
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        for name, example in (("device", "cuda:1"), ("dtype", "float32")):
            if not isinstance(getattr(self, name), str):
                raise BackendError(f"{name} must be a string like {example!r}, got {getattr(self, name)!r}")
        for name in ("tp_size", "dp_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise BackendError(f"{name} must be a whole number of at least 1, got {size!r}")
        self._check_nodes()
        if self.warmup not in get_args(Warmup):
            raise BackendError(f"warmup must be one of {', '.join(get_args(Warmup))}, got {self.warmup!r}")
        if self.quantization not in (None, *get_args(QuantizationName)):
            raise BackendError(f"unknown quantization {self.quantization!r}; expected fp8")
        if self.kv_cache_dtype not in get_args(KVCacheDtypeName):
            raise BackendError(f"unknown kv_cache_dtype {self.kv_cache_dtype!r}; expected auto, fp8 or fp8_e4m3")
        if self.prefix_attention_dtype not in get_args(PrefixAttentionDtypeName):
            raise BackendError(f"unknown prefix_attention_dtype {self.prefix_attention_dtype!r}; expected auto or fp8")

    def _check_nodes(self) -> None:
        """Raises BackendError."""
        for name, least, most in (("nnodes", 1, None), ("node_rank", 0, self.nnodes)):
            number = getattr(self, name)
            is_whole = isinstance(number, int) and not isinstance(number, bool)
            if not is_whole or number < least or (most is not None and number >= most):
                expected = f"of at least {least}" if most is None else f"from 0 to nnodes - 1 ({most - 1})"
                raise BackendError(f"{name} must be a whole number {expected}, got {number!r}")
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise BackendError("nnodes > 1 needs dist_init_addr, the address of rank 0, as in 10.0.0.1:5000")
        if self.nnodes > 1 and self.tp_size * self.dp_size < self.nnodes:
            sizes = f"tp_size={self.tp_size} and dp_size={self.dp_size}"
            raise BackendError(f"nnodes={self.nnodes} needs a device of every node in the model, got {sizes}")


@dataclass(frozen=True)
class BackendInfo:
    """The facts about a backend that planner and engine use."""

    name: str  # "torch", "jax", "fake"
    device: str  # "cpu", "cuda:0 (NVIDIA H200)"
    device_kind: DeviceKind
    dtype: str  # of the weights
    # Do serial, packed and prefill_extend give the same bits here? Then `auto` may depend on the number of items.
    algorithms_bit_equal: bool
    token_multiple: int  # forwards are padded to a multiple of this many tokens
    token_budget: int = DEFAULT_TOKEN_BUDGETS["cpu"]  # most tokens in one forward
    token_buckets: tuple[int, ...] = ()  # or to one of these sizes, where only these are compiled
    num_copies: int = 1  # of the model, which split the items of an extend forward, and the sequences of other layouts
    num_kv_blocks: int = 1 << 20  # that fit in the KV cache
    kv_block_bytes: int = 0  # of one KV block, on each device
    max_kv_blocks_read: int | None = None  # by one forward, a block counted once per prefix that has it; None: any
    attention: str = "none"  # the implementation that was chosen
    quantization: str | None = None  # of the linear layers: fp8
    kv_cache_dtype: str | None = None  # fp8, or None: that of the arithmetic
    prefix_attention_dtype: str | None = None  # fp8, or None: that of the arithmetic
    batch_invariant: bool = False  # has an item the same bits in forwards of every size?
    compute_dtype: str | None = None  # of activations and GEMMs; None: that of the weights
    compilation_cache_dir: str | None = None  # of compiled programs; None: they are not cached
    step_tokens: int = 2048  # most tokens of a step: more do not use the device better
    # A step should take no longer, as newcomers wait for it, unless that wastes an accelerator; None: no bound.
    step_seconds: float | None = None
    # Forwards of a multiple of so many tokens take less time per token: their attention tiles use all cores to the end.
    wave_tokens: int = 1
    least_step_tokens: int = 1  # a step may have as many however long it takes: fewer would waste the device
    # Items of more tokens are computed in pieces. Never a measurement: the cut decides an item's bits.
    max_whole_item: int = 1024
    reads_short_blocks: bool = False  # may a KV block in the middle of a prefix have fewer tokens than the others?
    # Should one forward both cache KV blocks and score items, which may read them? That is faster where launching a
    # forward takes long, and where GEMMs of few rows do not fill the device.
    joins_prefill: bool = False
    # Does the device run on its own once a forward is started? Then the next step may start before the forward is done,
    # and another thread than the engine's may call `wait`.
    async_scheduling: bool = False
    max_loras: int = 0  # slots for LoRA adapters, numbered from 1
    max_lora_rank: int = 0

    @property
    def max_prefix_len(self) -> int:
        """The longest prefix that fits in the KV cache."""
        return self.num_kv_blocks * KV_BLOCK_SIZE


@dataclass(frozen=True)
class Program:
    """Something that is compiled once. The thread that owns the device calls both functions."""

    title: str
    # Trace and lower the program. The function that it returns compiles the program, on any thread, in parallel with
    # other programs. None: `prepare` does everything.
    lower: Callable[[], Callable[[], None]] | None
    prepare: Callable[[], object]  # run it once; compiles it first where needed


class Backend(ABC):
    """A model on a device."""

    config: ModelConfig
    info: BackendInfo

    @abstractmethod
    def start(self, batch: ForwardBatch) -> RunningForward:
        """Start one forward pass; an accelerator runs it while the host prepares the next.

        A segment's numbers depend on its own tokens and on the prefix tokens that it reads, bit for bit. Forwards run
        in the order in which they are started. Raises BackendError where the KV blocks to cache do not fit.
        """

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward pass, and wait for it."""
        return self.start(batch).wait()

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> Sequence[Program]:
        """Every program that a forward can need; none for a backend that compiles nothing.

        `max_dense_len`: the longest packed sequence with a dense mask; 0 where there are none. `has_sequences`: False
        where only a request that names its algorithm has packed or serial sequences, which may then wait for theirs.
        """
        return ()

    def end_warm_up(self) -> None:  # noqa: B027  # optional: not needed where nothing was put off
        """All programs have run once, and requests come from now on: begin what none of them should wait for."""

    def load_lora(self, slot: int, adapter: LoraAdapter) -> None:
        """Put an adapter into a slot, from 1 to `BackendInfo.max_loras`, for the forwards that start after it."""
        raise BackendError("this backend has no LoRA adapters")

    def when_lost(self, callback: Callable[[str], None]) -> None:  # noqa: B027  # optional: a device may report itself
        """Call the function with the reason, on any thread, when it is known that the device computes no more."""

    def synchronize(self) -> None:  # noqa: B027  # optional: not needed where forwards return when they are done
        """Wait until the device is idle."""

    def memory_stats(self) -> Mapping[str, int]:
        """Bytes on its devices by name, with `peak_bytes` where that is known; empty on a CPU."""
        return {}

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return 0

    @property
    def is_compiling(self) -> bool:
        """A forward that was started waits for a program that is compiled now. Any thread may ask."""
        return False

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Did the forward fail for lack of memory? Then a smaller one may succeed."""
        return isinstance(error, MemoryError)

    def close(self) -> None:  # noqa: B027  # optional: not needed where nothing is held
        """Free the device's memory."""


# A batch of one token. It reads nothing, so a device that cannot run it cannot run anything.
PROBE = ForwardBatch(
    Layout.CAUSAL,
    token_ids=np.zeros(1, np.int32),
    positions=np.zeros(1, np.int32),
    segment_starts=np.arange(2),
    prefix_index=np.full(1, -1),
    prefix_lens=np.zeros(1, np.int64),
    prefixes=(),
    sequence_starts=np.arange(2),
    score_tokens=np.zeros(1, np.int64),
    label_ids=np.zeros((1, 1), np.int32),
)


def check_blocks(batch: ForwardBatch, blocks: Sequence[KVBlock]) -> Sequence[KVBlock]:
    """Releases the blocks and raises BackendError unless there is one per segment to cache, with its tokens."""
    segments = np.array(batch.cache_segments, np.int64)
    lens = (batch.segment_starts[segments + 1] - batch.segment_starts[segments]).tolist()
    got = [block.num_tokens for block in blocks]
    if got == lens:
        return blocks
    for block in blocks:
        block.release()
    raise BackendError(f"the backend must return KV blocks of {lens} tokens, got {got}")


def check_output(batch: ForwardBatch, output: ForwardOutput, model_size: int) -> None:
    """Raises BackendError unless every array has the shape and the dtype that the batch asks for.

    NumPy would stretch one row over all, and every item would get the first one's scores.
    """
    num_rows = len(batch.score_tokens)
    _check_array("label_logits", output.label_logits, batch.label_ids.shape)
    if num_rows and (batch.need_logsumexp or batch.top_k):
        _check_array("logsumexp", output.logsumexp, (num_rows,))
    if num_rows and batch.need_hidden:
        _check_array("hidden", output.hidden, (num_rows, model_size))
    if num_rows and batch.top_k:
        _check_array("top_logits", output.top_logits, (num_rows, batch.top_k))
        _check_array("top_ids", output.top_ids, (num_rows, batch.top_k), np.dtype(np.int32))


def _check_array(
    name: str, array: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any] = _FLOAT32
) -> None:
    if array is None or array.shape != shape or array.dtype != dtype:
        got = "none" if array is None else f"{list(array.shape)} of {array.dtype}"
        raise BackendError(f"the backend must return {name} {list(shape)} of {dtype}, got {got}")
