"""Options that more than one verb has in the same words."""

from __future__ import annotations

from functools import partial
from typing import Annotated, get_args

import typer

from prefixwise.contract.request import Algorithm

input_option = partial(typer.Option, rich_help_panel="Input")
scoring_option = partial(typer.Option, rich_help_panel="Scoring")
output_option = partial(typer.Option, rich_help_panel="Output")

FORMAT_HELP = (
    'lines, or jsonl: each line a JSON string or an object with a "text". From the file\'s name when left out.'
)

QueryFile = Annotated[
    str | None,
    input_option(metavar="FILE", help="The query from a file (- for stdin), without its last line end."),
]
AlgorithmOption = Annotated[
    Algorithm,
    scoring_option(
        "--algorithm",
        metavar="NAME",
        help=f"How the items share their prefix: {', '.join(get_args(Algorithm))}.",
    ),
]
Debug = Annotated[
    bool,
    output_option(
        "--debug",
        metavar="",
        help="Also how it was computed and how long it took: in the JSON, or on stderr.",
    ),
]
Quiet = Annotated[
    bool,
    output_option("--quiet", metavar="", help="No progress and no summary on stderr; warnings stay."),
]
