"""A legal rerank request, and what comes back: the counterparts of `request.py` and `result.py`.

`parse_rerank.py` makes the request; a profile (`prompts/profile.py`) says which tokens its documents become; every
document then is an item like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prefixwise.contract.request import Algorithm
from prefixwise.contract.result import Truncation, Usage

TruncationSide = Literal["right", "left"]  # which end of a document is cut off


@dataclass(frozen=True)
class RerankRequest:
    """One query and the documents to be ordered by it."""

    query: str
    documents: tuple[str, ...]
    top_n: int | None = None  # None: all
    profile: str | None = None  # None: the one that goes with the model
    instruction: str | None = None  # None: the profile's own
    max_tokens_per_doc: int | None = None  # longer documents are cut; None: as long as fits
    max_chunks_per_doc: int | None = None  # a document that does not fit is cut into so many, and its best one counts
    truncate: bool = True  # False: a document that does not fit is an error
    truncation_side: TruncationSide = "right"
    priority: int = 0  # lower ones are served first
    algorithm: Algorithm = "auto"
    return_debug: bool = False
    debug_top_k: int | None = None  # as in `request.py`
    model: str | None = None
    documents_field: str = "documents"  # what the caller's dialect calls them, for errors

    @property
    def num_items(self) -> int:
        return len(self.documents)


@dataclass(frozen=True)
class RerankedDocument:
    """One document in its place."""

    index: int  # where it stood in the request
    document: str
    relevance_score: float  # from 0 to 1
    raw_score: float  # before it was brought there: for most profiles a difference of logits


@dataclass(frozen=True)
class RerankResult:
    """The documents best first, ties in the order of the request."""

    results: list[RerankedDocument]
    model: str
    profile: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()
    warnings: tuple[str, ...] = ()
    debug: Mapping[str, object] | None = None
