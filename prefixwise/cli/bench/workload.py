"""`prefixwise bench workload`: write the canonical workload that every backend is measured and compared on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixwise.cli.bench_common import integers, last_line
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say
from prefixwise.contract.errors import count

Model = Annotated[
    str, typer.Option(metavar="NAME", help="A folder, a .gguf file, a hub id, or embedded; nothing is downloaded.")
]
LabelTokenIds = Annotated[
    str | None,
    typer.Option(metavar="ID,ID,...", help="Whose probabilities are asked for; 9454,2753 where the model has them."),
]
DelimiterTokenId = Annotated[
    int | None, typer.Option(metavar="ID", help="What stands between items; 151643 where the model has it.")
]
Output = Annotated[Path, typer.Option("--output", "--output-json", metavar="FILE", help="Where the workload goes.")]


def bench_workload(
    output: Output,
    model: Model = "Qwen/Qwen3-0.6B",
    query_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Length of the query.")] = 2000,
    num_items: Annotated[int, typer.Option(metavar="N", min=1, help="Items of a request.")] = 500,
    item_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Length of each item.")] = 20,
    label_token_ids: LabelTokenIds = None,
    delimiter_token_id: DelimiterTokenId = None,
    num_requests: Annotated[int, typer.Option(metavar="N", min=1, help="Requests, each with other tokens.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed, other tokens.")] = 0,
) -> None:
    """Write a workload of random tokens: the same arguments give the same requests and checksums everywhere."""
    from prefixwise.bench.files import write_artifact
    from prefixwise.bench.run.workload import WorkloadOptions, make_workload
    from prefixwise.bench.tokens import token_facts
    from prefixwise.contract.errors import ArtifactError

    labels = None if label_token_ids is None else _labels(label_token_ids)
    options = WorkloadOptions(query_tokens, num_items, item_tokens, num_requests, seed, labels, delimiter_token_id)
    facts = token_facts(model)
    say(f"{facts.model}: vocabulary of {facts.vocab_size}; the token pool comes from {facts.source}")
    try:
        workload = make_workload(options, facts)
    except ArtifactError as error:  # the ids that were asked for are not the model's
        raise CommandError(str(error), status=MISUSED) from None
    if len(workload.label_token_ids) == 1:
        workload.notes.append("there is one label: with softmax over one label every score is 1.0")
    for note in workload.notes:
        say(f"warning: {note}", style="yellow")
    write_artifact(output, workload)
    size = f"query of {count(query_tokens, 'token')}, {count(num_items, 'item')} of {item_tokens}"
    say(f"{output}: {num_requests} x ({size})")
    last_line({"output": str(output), "model": workload.model, "checksums": workload.checksums})


def _labels(text: str) -> tuple[int, ...]:
    labels = tuple(integers(text, "--label-token-ids"))
    if len(set(labels)) < len(labels):
        raise CommandError(f"--label-token-ids must be different ids, got {text!r}", status=MISUSED)
    return labels
