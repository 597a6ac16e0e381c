"""The options that shape one request of `itemwise score`, and how its answer is shown.

A flag has an empty metavar because it takes no value, and a choice names its values in its help: spelled out
as the metavar they would leave the help no room.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, get_args

import typer

from itemwise.cli.read_inputs import ItemsFormat
from itemwise.contract.request import Algorithm, LabelScoring, OnItemError, ScoreMode, Tokenization

_input = partial(typer.Option, rich_help_panel="Input")
_scoring = partial(typer.Option, rich_help_panel="Scoring")
_output = partial(typer.Option, rich_help_panel="Output")

Query = Annotated[str | None, _input("--query", "-q", metavar="TEXT", help="The text before every item.")]
QueryFile = Annotated[
    str | None,
    _input(metavar="FILE", help="The query from a file (- for stdin), without its last line end."),
]
Items = Annotated[list[str] | None, _input("--item", "-i", metavar="TEXT", help="An item; may be repeated.")]
ItemsFile = Annotated[
    str | None,
    _input(metavar="FILE", help="More items, one per line (- for stdin); blank lines at the end do not count."),
]
ItemsFormatOption = Annotated[
    ItemsFormat | None,
    _input(
        "--items-format",
        metavar="NAME",
        help='lines, or jsonl: each line a JSON string or an object with a "text". '
        "From the file's name when left out.",
    ),
]
Labels = Annotated[
    list[str] | None,
    _input(
        "--label",
        "-l",
        metavar="TEXT",
        help='A label, as in " yes"; may be repeated. Items are ranked by the first.',
    ),
]
LabelTokenIds = Annotated[
    list[int] | None,
    _input("--label-token-id", metavar="ID", help="A label as a token id; may be repeated."),
]
Suffix = Annotated[str | None, _input(metavar="TEXT", help="The text after every item.")]

Softmax = Annotated[
    bool,
    _scoring("--softmax", metavar="", help="Probabilities over the labels alone, like --score-mode softmax."),
]
ScoreModeOption = Annotated[
    ScoreMode | None,
    _scoring(
        "--score-mode",
        metavar="NAME",
        help=f"What a score is: {', '.join(get_args(ScoreMode))}; prob when left out.",
    ),
]
LabelScoringOption = Annotated[
    LabelScoring,
    _scoring(
        "--label-scoring",
        metavar="NAME",
        help="single: a label is one token; sequence: the log-probabilities of its tokens are added up.",
    ),
]
TokenizationOption = Annotated[
    Tokenization,
    _scoring(
        "--tokenization",
        metavar="NAME",
        help="apart: query and item are tokenized by themselves; joint: as one text.",
    ),
]
ItemFirst = Annotated[bool, _scoring("--item-first", metavar="", help="The item before the query.")]
MaxTokensPerItem = Annotated[
    int | None, _scoring(min=1, metavar="N", help="Cut the ends of longer items; never cut when left out.")
]
AlgorithmOption = Annotated[
    Algorithm,
    _scoring(
        "--algorithm",
        metavar="NAME",
        help=f"How the items share their prefix: {', '.join(get_args(Algorithm))}.",
    ),
]
OnItemErrorOption = Annotated[
    OnItemError,
    _scoring(
        "--on-item-error",
        metavar="NAME",
        help="fail: one item that cannot be scored fails all; report: the others are scored.",
    ),
]

Top = Annotated[int | None, _output(min=1, metavar="N", help="Only the N best in the table.")]
AsJson = Annotated[
    bool,
    _output("--json", metavar="", help="One line of JSON in item order, the body that /v1/score answers with."),
]
Debug = Annotated[
    bool,
    _output(
        "--debug",
        metavar="",
        help="Also how it was computed and how long it took: in the JSON, or on stderr.",
    ),
]
Quiet = Annotated[
    bool,
    _output("--quiet", metavar="", help="No progress and no summary on stderr; warnings stay."),
]
