"""The shape of a benchmark's requests, as options that several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixwise.cli.bench_common import integers
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say

if TYPE_CHECKING:
    from prefixwise.bench.geometry import Preset, RequestMaker

GeometryName = Literal["contract", "small"]

GeometryPreset = Annotated[
    GeometryName,
    typer.Option(
        "--geometry",
        metavar="NAME",
        help="contract (2000 query tokens, 500 items of 20) or small (300, 10 items of 20, 120 requests/s).",
    ),
]
QueryTokens = Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens of a query; the geometry's.")]
NumItems = Annotated[int | None, typer.Option(metavar="N", min=1, help="Items of a request; the geometry's.")]
ItemTokens = Annotated[int | None, typer.Option(metavar="N", min=0, help="Tokens of an item; the geometry's.")]
LabelTokenIds = Annotated[
    str | None, typer.Option(metavar="ID,ID,...", help="Labels; 9454,2753, or 0,1 where the vocabulary is too small.")
]
VocabSize = Annotated[int | None, typer.Option(metavar="N", min=1, help="Ids are below it; as the server says.")]


def shape_of(name: GeometryName, query_tokens: int | None, num_items: int | None, item_tokens: int | None) -> Preset:
    """The named geometry, with the given values."""
    from dataclasses import replace

    from prefixwise.bench.geometry import PRESETS

    given = {"query_tokens": query_tokens, "num_items": num_items, "item_tokens": item_tokens}
    return replace(PRESETS[name], **{field: value for field, value in given.items() if value is not None})


def make_requests(
    shape: Preset,
    server_info: Mapping[str, Any],
    *,
    labels: str | None,
    vocab_size: int | None,
    distinct_queries: int,
    seed: int,
) -> RequestMaker:
    """Requests for this server. Raises CommandError where neither it nor an option gives the vocabulary size."""
    from prefixwise.bench.geometry import (
        DEFAULT_LABELS,
        GeometryError,
        RequestMaker,
        choose_labels,
        delimiter_of,
        vocab_size_of,
    )
    from prefixwise.bench.kinds.load import LoadGeometry

    vocab_size = vocab_size or vocab_size_of(server_info)
    if vocab_size is None:
        hint = "give --vocab-size, the number of token ids that the model knows"
        raise CommandError("the server does not report the size of its vocabulary", hint=hint, status=MISUSED)
    given = None if labels is None else integers(labels, "--label-token-ids")
    try:
        label_ids = choose_labels(given, vocab_size)
    except GeometryError as error:
        raise CommandError(str(error), status=MISUSED) from None
    if labels is None and label_ids != list(DEFAULT_LABELS):
        say(f"labels are {label_ids}: the vocabulary of {vocab_size} has no {list(DEFAULT_LABELS)}")
    geometry = LoadGeometry(
        query_tokens=shape.query_tokens,
        num_items=shape.num_items,
        item_tokens=shape.item_tokens,
        label_token_ids=label_ids,
        vocab_size=vocab_size,
        distinct_queries=distinct_queries,
    )
    return RequestMaker(geometry, seed, delimiter=delimiter_of(server_info))
