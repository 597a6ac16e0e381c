"""The options that shape the engine, for every verb that loads a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from itemwise.backends.base import Warmup
from itemwise.plan.options import MaskOption

if TYPE_CHECKING:
    from itemwise.engine.engine import ScoringEngine
    from itemwise.engine.warmup import OnProgram

_option = partial(typer.Option, rich_help_panel="Model and engine")

Model = Annotated[
    str | None,
    _option(
        metavar="MODEL",
        help="A folder, a .gguf file or a hub id like Qwen/Qwen3-0.6B; the embedded model when left out.",
    ),
]
BackendName = Annotated[
    str, _option(metavar="NAME", help="auto (JAX on TPUs and GPUs, PyTorch on CPUs), jax or torch.")
]
Device = Annotated[str, _option(metavar="NAME", help="auto, cpu, cuda, tpu, or one of many: cuda:1.")]
Dtype = Annotated[str, _option(metavar="NAME", help="auto, float32, bfloat16 or float16.")]
TpSize = Annotated[int, _option(min=1, metavar="N", help="Devices that share every layer (JAX).")]
DpSize = Annotated[int, _option(min=1, metavar="N", help="Copies of the model, each on devices of its own (JAX).")]
BatchInvariant = Annotated[
    bool,
    _option(
        "--batch-invariant",
        metavar="",
        help="An item's bits do not depend on the size of its batch, on devices where that costs speed.",
    ),
]
Attention = Annotated[
    str | None,
    _option(
        metavar="NAME", help="An attention implementation of JAX: pallas_gpu, xla or reference; the best that runs."
    ),
]
ChunkSize = Annotated[
    int | None,
    _option(
        min=0,
        metavar="N",
        help="Most items in one packed row or one forward; 0: no bound; chosen for you when left out.",
    ),
]
Mask = Annotated[
    MaskOption,
    _option(metavar="NAME", help=f"How packed rows are masked: {', '.join(get_args(MaskOption))}."),
]
SegmentFallbackThreshold = Annotated[
    int,
    _option(
        min=0, metavar="N", help="Mask auto: segment up to this many tokens in a packed row, then dense if it can."
    ),
]
TokenBudget = Annotated[
    int | None,
    _option(min=1, metavar="N", help="Most tokens in one forward; chosen for the device when left out."),
]
WarmupOption = Annotated[
    Warmup,
    _option(
        metavar="NAME",
        help="Compile all programs before scoring: full, fast (fewer, coarser sizes) or none "
        "(each when it is needed). PyTorch has none to compile.",
    ),
]
CompilationCacheDir = Annotated[
    str | None,
    _option(metavar="DIR", help="Where compiled programs are kept; a cache folder of yours on TPUs and GPUs."),
]
PrefixCacheBytes = Annotated[
    int | None,
    _option(min=1, metavar="N", help="Memory for prefixes on each device (JAX); chosen when left out."),
]
DelimiterTokenId = Annotated[
    int | None,
    _option(min=0, metavar="ID", help="A token between the query and every item; none when left out."),
]


@dataclass(frozen=True)
class EngineOptions:
    """What was asked for, as `itemwise.Scorer` takes it."""

    model: str | None = None
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    tp_size: int = 1
    dp_size: int = 1
    batch_invariant: bool = False
    attention: str | None = None
    chunk_size: int | None = None
    mask: MaskOption = "auto"
    segment_fallback_threshold: int = 32_768
    token_budget: int | None = None
    delimiter_token_id: int | None = None
    warmup: Warmup = "none"
    compilation_cache_dir: str | None = None
    prefix_cache_bytes: int | None = None


def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
    """Load the model and warm it up. It is never closed: the process ends with its only request."""
    from itemwise.scorer import Scorer

    scorer = Scorer(
        **vars(options),
        on_program=on_program,
        max_items_per_request=sys.maxsize,  # a limit protects a server from its clients; here there are none
    )
    return scorer.engine
