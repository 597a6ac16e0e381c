"""`prefixwise validate endpoint`: one server's isolation and speed, for `prefixwise validate combine` to go on with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixwise.bench.options import EvaluationShape
from prefixwise.cli.bench_common import ApiKey, OutputJson, Timeout, last_line, print_server_info
from prefixwise.cli.failures import FAILED, print_error
from prefixwise.cli.output import say
from prefixwise.cli.progress import step_progress
from prefixwise.cli.validate.options import (
    DEFAULT_ITEM_COUNTS,
    Delimiter,
    ItemCounts,
    Labels,
    read_labels,
    with_item_counts,
    with_shape_options,
)
from prefixwise.contract.errors import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefixwise.bench.kinds.evaluation import EndpointEvaluation

ModeOption = Annotated[
    Literal["multi", "serial"],
    typer.Option("--mode", metavar="NAME", help="multi: one request holds all items; serial: one request per item."),
]


@with_shape_options
def validate_endpoint(
    mode: ModeOption,
    url: Annotated[str, typer.Option(metavar="URL", help="The server's, with or without /v1/score.")],
    output_json: OutputJson,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="As the server calls it; its first one when left out.")
    ] = None,
    labels: Labels = None,
    delimiter: Delimiter = None,
    item_counts: ItemCounts = DEFAULT_ITEM_COUNTS,
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", min=8, help="Of the model, where the server does not report it.")
    ] = None,
    timeout_sec: Timeout = 180.0,
    api_key: ApiKey = None,
    *,
    shape: EvaluationShape,
) -> None:
    """Evaluate one server: does an item's score depend on its neighbours, and how long do so many items take?"""
    shape = with_item_counts(shape, item_counts)
    asked = read_labels(labels)
    from prefixwise.bench.client import ScoreClient
    from prefixwise.bench.files import write_artifact
    from prefixwise.bench.run.validation import Endpoint, evaluate, num_steps, reported_vocab_size, settle_tokens
    from prefixwise.bench.run.workload import DEFAULT_MODEL
    from prefixwise.bench.server_facts import served_names

    with ScoreClient(url, timeout_sec=timeout_sec, api_key=api_key) as client:
        info = print_server_info(client)
        if mode == "multi" and delimiter is None:
            delimiter = _reported_delimiter(info)
        listed = client.get_json("/v1/models")
        model = model or next(iter(served_names(listed)), DEFAULT_MODEL)
        size = vocab_size or reported_vocab_size(info, listed)
        choice, notes = settle_tokens(asked, delimiter, size, model)
        for note in notes:
            say(f"note: {note}")
        if mode == "multi":
            _report_other_delimiter(info, choice.delimiter)
        with step_progress(num_steps(mode, shape), f"validate {mode} endpoint") as on_step:
            evaluation = evaluate(Endpoint(client, mode, model), choice, shape, on_step)
    evaluation.server_config = info
    write_artifact(output_json, evaluation)
    _report(evaluation)
    last_line({"output_json": str(output_json), **_summary(evaluation)})
    for num_items, failure in evaluation.failures.items():
        print_error(f"{count(int(num_items), 'item')}: {failure}")
    if evaluation.failures:
        raise typer.Exit(FAILED)


def _reported_delimiter(info: Mapping[str, Any]) -> int | None:
    """The server's own delimiter, where it reports one."""
    configuration = info.get("configuration")
    own = configuration.get("delimiter_token_id") if isinstance(configuration, dict) else None
    return own if isinstance(own, int) else None


def _report_other_delimiter(info: Mapping[str, Any], delimiter: int) -> None:
    """With another delimiter the aligned scores cannot be equal."""
    configuration = info.get("configuration")
    if not isinstance(configuration, dict) or "delimiter_token_id" not in configuration:
        return
    own = configuration["delimiter_token_id"]
    if own != delimiter:
        said = "no delimiter" if own is None else f"delimiter {own}"
        say(f"note: this server has {said}, so that the scores aligned with delimiter {delimiter} will differ")


def _report(evaluation: EndpointEvaluation) -> None:
    isolation = evaluation.isolation
    changes = {"the same": isolation.same_length_mutation, "another": isolation.changed_length_mutation}
    for length, change in changes.items():
        say(f"a neighbour of {length} length changes a score by at most {change.max_abs_diff_unchanged:.3g}")
    for num_items, each in evaluation.performance.items():
        say(f"{count(int(num_items), 'item')}: {1000 * each.p50_sec:,.1f} ms (p50)")


def _summary(evaluation: EndpointEvaluation) -> dict[str, Any]:
    isolation = evaluation.isolation
    return {
        "mode": evaluation.mode,
        "model": evaluation.model,
        "labels": evaluation.labels,
        "delimiter": evaluation.delimiter,
        "same_length_mutation_max_abs_diff": isolation.same_length_mutation.max_abs_diff_unchanged,
        "changed_length_mutation_max_abs_diff": isolation.changed_length_mutation.max_abs_diff_unchanged,
        "failures": evaluation.failures,
        "p50_sec": {count: each.p50_sec for count, each in evaluation.performance.items()},
    }
