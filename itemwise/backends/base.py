"""What the engine asks of a backend: one forward pass over a batch of segments.

Every algorithm is the same forward with another **attention layout**. A batch is a flat run of tokens, cut into
*segments*. A segment is a prefix or an item's tail. Its tokens see

    the first `prefix_lens[i]` tokens of its prefix   (none, cached, or another segment of the same forward)
    its own tokens up to themselves                   (causal)

and nothing else, so who else is in the batch cannot matter:

    causal   [prefix][item 0]  [prefix][item 1]  ...     serial: each item with its own copy of the prefix
    packed   [prefix][item 0][item 1][item 2]  ...       items of a row read the row's prefix segment
    extend   [item 0][item 1][item 2]  ...               prefixes were computed before; any number of them

Positions continue from the prefix's length, whichever item it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from itemwise.contract.errors import BackendError
from itemwise.contract.ragged import Int32Array, Int64Array
from itemwise.models.config import ModelConfig

MaskImpl = Literal["dense", "segment"]
DeviceKind = Literal["cpu", "gpu", "tpu"]
Warmup = Literal["full", "fast", "none"]

# Most tokens in one forward, where the user leaves it open.
DEFAULT_TOKEN_BUDGETS: dict[DeviceKind, int] = {"cpu": 16_384, "gpu": 65_536, "tpu": 65_536}


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
    # JAX only: memory for the keys and values of prefixes, on each device; None: chosen for the device.
    prefix_cache_bytes: int | None = None
    compilation_cache_dir: str | None = None  # JAX only; None: the user's cache folder, on accelerators
    warmup: Warmup = "none"  # `fast` has fewer, coarser sizes of programs, so that there are fewer to compile

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise BackendError(f"{name} must be a whole number of at least 1, got {size!r}")
        if self.warmup not in get_args(Warmup):
            raise BackendError(f"warmup must be one of {', '.join(get_args(Warmup))}, got {self.warmup!r}")


class Layout(StrEnum):
    """How the segments of a forward relate to each other."""

    CAUSAL = "causal"
    PACKED = "packed"
    EXTEND = "extend"


@dataclass(frozen=True)
class PrefixState(ABC):
    """Keys and values of a prefix in every layer, held by the backend that made them."""

    num_tokens: int

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    def release(self) -> None:  # noqa: B027  # most need not: their memory goes with the last reference
        """Give its memory back now; it must not be read again. Called twice, it does nothing."""


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass: the tokens, who sees whom, and which logits are wanted. Arrays are numpy, on the host."""

    layout: Layout
    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    segment_starts: Int64Array  # [segments + 1]: segment i is tokens segment_starts[i]..segment_starts[i + 1]
    prefix_index: Int64Array  # [segments]: which of `prefixes` it reads, -1 for none
    prefix_lens: Int64Array  # [segments]: how many tokens of it
    prefixes: tuple[PrefixState | int, ...]  # a cached prefix, or the number of the segment that holds it
    row_starts: Int64Array  # [rows + 1]: tokens of each sequence of the causal and packed layouts
    score_tokens: Int64Array  # [R]: tokens after which logits are wanted
    label_ids: Int32Array  # [R, L]: at which vocabulary entries
    need_normalizers: bool = False  # also the log-sum-exp over the whole vocabulary?
    keep_segments: tuple[int, ...] = ()  # segments whose keys and values are to be kept as a PrefixState
    mask: MaskImpl = "segment"  # packed layout only

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class ForwardOutput:
    """What comes back to the host, and the prefixes that stay on the device."""

    label_logits: NDArray[np.float32]  # [R, L]
    log_normalizers: NDArray[np.float32] | None  # [R]
    prefixes: tuple[PrefixState, ...]  # one per `keep_segments`


@dataclass(frozen=True)
class BackendInfo:
    """What the planner may know about a backend."""

    name: str  # "torch", "jax", "fake"
    device: str  # "cpu", "cuda:0 (NVIDIA H200)"
    device_kind: DeviceKind
    dtype: str
    # Do serial, packed and prefill_extend give the same bits here? Then `auto` may look at the number of items.
    algorithms_bit_equal: bool
    token_multiple: int  # forwards are padded to a multiple of this many tokens
    token_budget: int = DEFAULT_TOKEN_BUDGETS["cpu"]  # most tokens in one forward
    token_buckets: tuple[int, ...] = ()  # or to one of these sizes, where only they were compiled
    num_copies: int = 1  # of the model, which share out the items of an extend forward, and the rows of the others
    max_prefix_len: int | None = None  # the longest prefix that can be kept between forwards; None: any


@dataclass(frozen=True)
class Program:
    """Something that is compiled once."""

    title: str
    prepare: Callable[[], None]  # compile it, and run it once


class Backend(ABC):
    """A model on a device."""

    config: ModelConfig
    info: BackendInfo

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one forward pass.

        A segment's numbers depend on its own tokens and on those of its prefix that it reads, bit for bit.
        """

    def programs(self, *, max_dense_row_len: int) -> Sequence[Program]:
        """All that any forward can need; none for a backend that compiles nothing.

        `max_dense_row_len`: the longest row of a packed forward with a dense mask; 0 where there are none.
        """
        return ()

    def synchronize(self) -> None:  # noqa: B027  # a backend whose forwards return when they are done need not say so
        """Return when the device has done all that it was given. A forward that only keeps prefixes may run on."""

    def close(self) -> None:  # noqa: B027  # a backend that holds nothing need not say so
        """Give the device's memory back."""
