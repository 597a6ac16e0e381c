"""The options that shape the engine, for every verb that loads a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from itemwise.plan.options import MaskOption

if TYPE_CHECKING:
    from itemwise.engine.engine import ScoringEngine

_option = partial(typer.Option, rich_help_panel="Model and engine")

Model = Annotated[
    str | None,
    _option(
        metavar="MODEL",
        help="A folder, a .gguf file or a hub id like Qwen/Qwen3-0.6B; the embedded model when left out.",
    ),
]
BackendName = Annotated[str, _option(metavar="NAME", help="auto, or the name of a backend.")]
Device = Annotated[str, _option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, _option(metavar="NAME", help="auto, float32, bfloat16 or float16.")]
TpSize = Annotated[int, _option(min=1, metavar="N", help="Devices that share every layer.")]
DpSize = Annotated[int, _option(min=1, metavar="N", help="Copies of the model, each on devices of its own.")]
BatchInvariant = Annotated[
    bool,
    _option(
        "--batch-invariant",
        metavar="",
        help="An item's bits do not depend on the size of its batch, on devices where that costs speed.",
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
TokenBudget = Annotated[
    int | None,
    _option(min=1, metavar="N", help="Most tokens in one forward; chosen for the device when left out."),
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
    chunk_size: int | None = None
    mask: MaskOption = "auto"
    token_budget: int | None = None
    delimiter_token_id: int | None = None


def open_engine(options: EngineOptions) -> ScoringEngine:
    """Load the model. It is never closed: the process ends with its only request."""
    from itemwise.scorer import Scorer

    scorer = Scorer(
        options.model,
        backend=options.backend,
        device=options.device,
        dtype=options.dtype,
        tp_size=options.tp_size,
        dp_size=options.dp_size,
        batch_invariant=options.batch_invariant,
        chunk_size=options.chunk_size,
        mask=options.mask,
        token_budget=options.token_budget,
        delimiter_token_id=options.delimiter_token_id,
        max_items_per_request=sys.maxsize,  # a limit protects a server from its clients; here there are none
    )
    return scorer.engine
