"""The options that shape one request of `prefixwise rerank`, and how its answer is shown.

As in `score_options.py`, a flag has an empty metavar because it takes no value.
"""

from __future__ import annotations

from typing import Annotated

from prefixwise.cli.common_options import FORMAT_HELP, input_option, output_option, scoring_option
from prefixwise.cli.engine_options import ENGINE_FLAGS, PROFILE_FLAG
from prefixwise.cli.read_inputs import ItemsFormat

# A profile says what stands between query and document, so there is no delimiter to choose.
RERANK_ENGINE_FLAGS = {
    "model": ENGINE_FLAGS["model"],
    "profile": PROFILE_FLAG,
    **{field: flag for field, flag in ENGINE_FLAGS.items() if field not in ("model", "delimiter_token_id")},
}

Query = Annotated[
    str | None, input_option("--query", "-q", metavar="TEXT", help="What the documents are to be relevant to.")
]
Documents = Annotated[
    list[str] | None, input_option("--document", "-d", metavar="TEXT", help="A document; may be repeated.")
]
DocumentsFile = Annotated[
    str | None,
    input_option(
        metavar="FILE", help="More documents, one per line (- for stdin); blank lines at the end do not count."
    ),
]
DocumentsFormat = Annotated[ItemsFormat | None, input_option("--documents-format", metavar="NAME", help=FORMAT_HELP)]
Instruction = Annotated[
    str | None,
    input_option(metavar="TEXT", help="What makes a document relevant, in words; the profile's own when left out."),
]

MaxTokensPerDoc = Annotated[int | None, scoring_option(min=1, metavar="N", help="Cut the ends of longer documents.")]
MaxChunksPerDoc = Annotated[
    int | None,
    scoring_option(
        min=1,
        metavar="N",
        help="Cut a document that does not fit into up to N chunks, of which the best one counts; 1 when left out.",
    ),
]
NoTruncate = Annotated[
    bool,
    scoring_option("--no-truncate", metavar="", help="A document that does not fit is an error; else it is cut."),
]

TopN = Annotated[int | None, output_option("--top-n", min=1, metavar="N", help="Only the N best.")]
AsJson = Annotated[bool, output_option("--json", metavar="", help="One line of JSON, documents best first.")]
