"""`prefixwise rerank`: documents ordered by their relevance to a query, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from prefixwise.cli import request_options as option
from prefixwise.cli.engine_options import PANEL
from prefixwise.cli.failures import print_warning
from prefixwise.cli.flags import with_flags
from prefixwise.cli.output import Column, probability, render_table, say, start_of, stdout_width, write_data
from prefixwise.cli.output_file import OutputFile
from prefixwise.cli.read_inputs import ItemsSource, check_sources, read_query
from prefixwise.cli.run_request import (
    Finished,
    ask_server,
    load_time,
    print_debug,
    print_truncated,
    run_request,
    run_summary,
    size_and_time,
)
from prefixwise.cli.server_address import ApiKey, ServerAddress, Timeout, Url, server_address
from prefixwise.contract.rerank_request import rerank_fields
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.contract.result import RerankedDocument, RerankResult
    from prefixwise.engine.engine import OnProgress, ScoringEngine

# A request may name its profile, so a server takes that option, too.
_LOCAL_FLAGS = {field: flag for field, flag in option.RERANK_ENGINE_FLAGS.items() if field != "profile"}


@with_flags("engine", EngineOptions, option.RERANK_ENGINE_FLAGS, panel=PANEL)
@option.with_request_fields(fields=rerank_fields("native"))
def rerank(
    context: typer.Context,
    query: option.RerankQuery = None,
    query_file: option.QueryFile = None,
    documents: option.Documents = None,
    documents_file: option.DocumentsFile = None,
    documents_format: option.DocumentsFormat = None,
    documents_field: option.DocumentsField = None,
    *,
    fields: Mapping[str, object],
    as_json: option.RerankAsJson = False,
    output: option.Output = None,
    output_format: option.OutputFormatOption = None,
    debug: option.Debug = False,
    quiet: option.Quiet = False,
    url: Url = None,
    api_key: ApiKey = None,
    timeout_sec: Timeout = 180.0,
    engine: EngineOptions,
) -> None:
    """Order documents by how relevant they are to a query. Best first.

    The prompt is the one that the model was trained with, its profile (`prefixwise profiles` lists them).
    An example:

    \b
      prefixwise rerank -q "Where is Berlin?" --documents-file texts.csv --top 3
    """
    source = ItemsSource("document", documents or (), documents_file, documents_format, documents_field)
    check_sources(query, query_file, source)
    server = server_address(context, url, api_key, timeout_sec, _LOCAL_FLAGS)
    to_file = OutputFile.chosen(output, output_format)
    body = {"query": read_query(query, query_file), "documents": source.read(), **fields}
    if server is None:
        finished = _run(body, engine, quiet=quiet)
    else:
        finished = _ask({**body, "profile": engine.profile}, server, debug=debug)
    if to_file is not None:
        to_file.write(finished.result.to_dicts())
    if as_json:
        write_data(rerank_json(finished.result, with_debug=debug))
    elif to_file is None:
        write_data(rerank_table(finished.result, stdout_width()))
    print_notes(finished)
    if debug and not as_json:
        print_debug(finished.result.debug)
    if not quiet:
        say(summary_line(finished), style="dim")


def _run(body: dict[str, object], options: EngineOptions, *, quiet: bool) -> Finished[RerankResult]:
    """The request is checked before the model is loaded, so a mistake is reported at once."""
    from prefixwise.contract.parse import parse_rerank_request

    request = parse_rerank_request({**body, "return_debug": True})  # the summary names the chosen algorithm

    def run(engine: ScoringEngine, on_progress: OnProgress | None) -> RerankResult:
        from prefixwise.engine.reranker import Reranker

        return Reranker(engine).rerank(request, on_progress)

    return run_request(options, request.num_items, run, quiet=quiet)


def _ask(body: dict[str, Any], server: ServerAddress, *, debug: bool) -> Finished[RerankResult]:
    asked = {**body, "return_debug": debug}
    return ask_server(server, len(body["documents"]), lambda client: client.post_rerank(asked))


def rerank_json(result: RerankResult, *, with_debug: bool) -> str:
    """One line; the keys truncated, warnings and debug only if they are not empty."""
    body: dict[str, object] = {
        "model": result.model,
        "profile": result.profile,
        "results": [_document_json(document) for document in result.results],
        "usage": result.usage.to_json(),
    }
    if result.truncated:
        body["truncated"] = [asdict(truncation) for truncation in result.truncated]
    if result.warnings:
        body["warnings"] = list(result.warnings)
    if with_debug and result.debug:
        body["debug"] = dict(result.debug)
    return json.dumps(body) + "\n"


def _document_json(document: RerankedDocument) -> dict[str, object]:
    return {
        "index": document.index,
        "relevance_score": document.relevance_score,
        "raw_score": document.raw_score,
        "document": {"text": document.document},
    }


def rerank_table(result: RerankResult, width: int) -> str:
    """The documents, best first, their text cut to the width."""
    documents = result.results
    columns = [
        Column("rank", [str(rank) for rank in range(1, len(documents) + 1)], align_right=True),
        Column("relevance", [probability(each.relevance_score) for each in documents], align_right=True),
        Column("index", [str(each.index) for each in documents], align_right=True),
        Column("document", [start_of(each.document, width) for each in documents], may_shrink=True),
    ]
    return render_table(columns, width)


def print_notes(finished: Finished[RerankResult]) -> None:
    """Print the warnings, and which documents were truncated."""
    result = finished.result
    for warning in result.warnings:
        print_warning(warning)
    print_truncated(result.truncated, finished.num_items, "document")


def summary_line(finished: Finished[RerankResult]) -> str:
    """Model, device, algorithm, profile, and times."""
    result = finished.result
    ran = f"{run_summary(result.model, finished, result.debug)}, profile {result.profile}"
    speed = f"{finished.num_items / finished.run_seconds:,.1f} documents/s"
    return f"{ran}: {size_and_time(finished, 'document', result.usage)}, {speed}{load_time(finished)}"
