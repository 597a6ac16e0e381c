"""The options that shape one request of `prefixwise score`, and how its answer is shown.

A flag has an empty metavar because it takes no value, and a choice names its values in its help: spelled out
as the metavar they would leave the help no room.
"""

from __future__ import annotations

from typing import Annotated, get_args

from prefixwise.cli.common_options import FORMAT_HELP, input_option, output_option, scoring_option
from prefixwise.cli.read_inputs import ItemsFormat
from prefixwise.contract.request import LabelScoring, OnItemError, ScoreMode, Tokenization

Query = Annotated[str | None, input_option("--query", "-q", metavar="TEXT", help="The text before every item.")]
Items = Annotated[list[str] | None, input_option("--item", "-i", metavar="TEXT", help="An item; may be repeated.")]
ItemsFile = Annotated[
    str | None,
    input_option(metavar="FILE", help="More items, one per line (- for stdin); blank lines at the end do not count."),
]
ItemsFormatOption = Annotated[ItemsFormat | None, input_option("--items-format", metavar="NAME", help=FORMAT_HELP)]
Labels = Annotated[
    list[str] | None,
    input_option(
        "--label",
        "-l",
        metavar="TEXT",
        help='A label, as in " yes"; may be repeated. Items are ranked by the first.',
    ),
]
LabelTokenIds = Annotated[
    list[int] | None,
    input_option("--label-token-id", metavar="ID", help="A label as a token id; may be repeated."),
]
Suffix = Annotated[str | None, input_option(metavar="TEXT", help="The text after every item.")]

Softmax = Annotated[
    bool,
    scoring_option("--softmax", metavar="", help="Probabilities over the labels alone, like --score-mode softmax."),
]
ScoreModeOption = Annotated[
    ScoreMode | None,
    scoring_option(
        "--score-mode",
        metavar="NAME",
        help=f"What a score is: {', '.join(get_args(ScoreMode))}; prob when left out.",
    ),
]
LabelScoringOption = Annotated[
    LabelScoring,
    scoring_option(
        "--label-scoring",
        metavar="NAME",
        help="single: a label is one token; sequence: the log-probabilities of its tokens are added up.",
    ),
]
TokenizationOption = Annotated[
    Tokenization,
    scoring_option(
        "--tokenization",
        metavar="NAME",
        help="apart: query and item are tokenized by themselves; joint: as one text.",
    ),
]
ItemFirst = Annotated[bool, scoring_option("--item-first", metavar="", help="The item before the query.")]
MaxTokensPerItem = Annotated[
    int | None, scoring_option(min=1, metavar="N", help="Cut the ends of longer items; never cut when left out.")
]
OnItemErrorOption = Annotated[
    OnItemError,
    scoring_option(
        "--on-item-error",
        metavar="NAME",
        help="fail: one item that cannot be scored fails all; report: the others are scored.",
    ),
]

Top = Annotated[int | None, output_option(min=1, metavar="N", help="Only the N best in the table.")]
AsJson = Annotated[
    bool,
    output_option("--json", metavar="", help="One line of JSON in item order, the body that /v1/score answers with."),
]
