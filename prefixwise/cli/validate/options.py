"""The options that the verbs of `validate` share: what servers are asked, and the bounds of the gates."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from prefixwise.bench.options import ITEM_COUNTS, EvaluationShape, GateBounds
from prefixwise.cli.bench_common import integers
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import Flag, Verb, with_flags

DEFAULT_ITEM_COUNTS = ",".join(map(str, ITEM_COUNTS))

_LABELS = "--label-token-ids"

Labels = Annotated[
    str | None,
    typer.Option(_LABELS, metavar="ID,ID,...", help="The labels; 9454,2753, or others where the model lacks these."),
]
Delimiter = Annotated[
    int | None,
    typer.Option(
        "--delimiter-token-id",
        metavar="ID",
        min=0,
        help="The multi-item server's delimiter; 151643, or another where the model lacks it.",
    ),
]
ItemCounts = Annotated[
    str, typer.Option("--item-counts", metavar="N,N,...", help="How many items to measure the time of.")
]

_SHAPE_FLAGS = {
    "timed_runs": Flag(int, "Runs that count, for every item count.", least=1, other_names=("--rounds",)),
    "warmup_runs": Flag(int, "Runs before them that do not.", least=0, other_names=("--warmup",)),
    "query_tokens": Flag(int, "Tokens of the query.", least=1),
    "item_tokens": Flag(int, "Tokens of an item; where isolation is looked at, about so many.", least=1),
    "seed": Flag(int, "Another seed, other tokens.", least=0),
}
_GATE_FLAGS = {
    "max_same_length_isolation": Flag(float, "Of unchanged items, when another has other tokens.", "DIFF", least=0),
    "max_changed_length_isolation": Flag(float, "The same, when it has another length, too.", "DIFF", least=0),
    "max_equivalence": Flag(float, "Multi against serial, of query + delimiter + item.", "DIFF", least=0),
    "min_speedup": Flag(float, "Serial's median time over multi's.", "RATIO", least=0),
    "speedup_items": Flag(int, "At so many items.", least=1),
    "max_parity": Flag(float, "Serial against transformers.", "DIFF", least=0),
}


def with_shape_options(verb: Verb) -> Verb:
    """Gives a verb `shape`, without its item counts."""
    return with_flags("shape", EvaluationShape, _SHAPE_FLAGS, panel="Runs")(verb)


def with_gate_options(verb: Verb) -> Verb:
    """Gives a verb `bounds`."""
    return with_flags("bounds", GateBounds, _GATE_FLAGS, panel="Gates")(verb)


def with_item_counts(shape: EvaluationShape, text: str) -> EvaluationShape:
    """Raises CommandError."""
    counts = integers(text, "--item-counts")
    if min(counts) < 1:
        raise CommandError(f"--item-counts must be 1 or more each, got {text!r}", status=MISUSED)
    return replace(shape, item_counts=tuple(dict.fromkeys(counts)))


def read_labels(text: str | None) -> Sequence[int] | None:
    """Raises CommandError."""
    labels = None if text is None else integers(text, _LABELS)
    if labels is not None and min(labels) < 0:
        raise CommandError(f"{_LABELS} must be 0 or more each, got {text!r}", status=MISUSED)
    if labels is not None and (len(labels) < 2 or len(set(labels)) < len(labels)):
        # Of one label alone every probability is 1, and everything would be equal.
        raise CommandError(f"{_LABELS} must be two or more, each once, got {text!r}", status=MISUSED)
    return labels


ServerFlag = Annotated[
    list[str] | None,
    typer.Option(metavar="FLAG", help='For every server, as in --server-flag="--dtype float32"; may be repeated.'),
]


def split_server_flags(flags: Sequence[str] | None) -> tuple[str, ...]:
    """Split flags like a shell. Raises CommandError."""
    try:
        return tuple(word for flag in flags or () for word in shlex.split(flag))
    except ValueError as error:
        raise CommandError(f"--server-flag cannot be split into arguments: {error}", status=MISUSED) from None
