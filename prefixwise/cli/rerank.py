"""`prefixwise rerank`: documents ordered by their relevance to a query, as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixwise.cli import common_options as common
from prefixwise.cli import rerank_options as option
from prefixwise.cli.engine_options import PANEL
from prefixwise.cli.flags import with_flags
from prefixwise.cli.output import say, stdout_width, write_data
from prefixwise.cli.read_inputs import check_sources, read_items, read_query
from prefixwise.cli.report_notes import tell_debug
from prefixwise.cli.rerank_report import rerank_json, rerank_table, summary_line, tell_notes
from prefixwise.cli.run_request import Finished, run_request
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.contract.rerank import RerankRequest, RerankResult
    from prefixwise.engine.engine import OnProgress, ScoringEngine


@with_flags("engine", EngineOptions, option.RERANK_ENGINE_FLAGS, panel=PANEL)
def rerank(
    query: option.Query = None,
    query_file: common.QueryFile = None,
    documents: option.Documents = None,
    documents_file: option.DocumentsFile = None,
    documents_format: option.DocumentsFormat = None,
    instruction: option.Instruction = None,
    max_tokens_per_doc: option.MaxTokensPerDoc = None,
    max_chunks_per_doc: option.MaxChunksPerDoc = None,
    no_truncate: option.NoTruncate = False,
    algorithm: common.AlgorithmOption = "auto",
    top_n: option.TopN = None,
    as_json: option.AsJson = False,
    debug: common.Debug = False,
    quiet: common.Quiet = False,
    *,
    engine: EngineOptions,
) -> None:
    """Order documents by how relevant they are to a query. Best first.

    The prompt is the one that the model was trained with: its profile (`prefixwise profiles` lists them).
    """
    check_sources(query, query_file, documents or (), documents_file, documents_format, noun="document")
    # The request is judged before the model is loaded: a mistake should not cost the wait.
    from prefixwise.contract.parse_rerank import parse_rerank_request

    request = parse_rerank_request(
        {
            "query": read_query(query, query_file),
            "documents": read_items(documents or (), documents_file, documents_format),
            "top_n": top_n,
            "instruction": instruction,
            "max_tokens_per_doc": max_tokens_per_doc,
            "max_chunks_per_doc": max_chunks_per_doc,
            "truncate": not no_truncate,
            "algorithm": algorithm,
            "return_debug": True,  # the summary names the algorithm that was chosen
        }
    )
    finished = _answer(request, engine, quiet=quiet)
    if as_json:
        write_data(rerank_json(finished.result, with_debug=debug))
    else:
        write_data(rerank_table(finished.result, stdout_width()))
    tell_notes(finished)
    if debug and not as_json:
        tell_debug(finished.result.debug)
    if not quiet:
        say(summary_line(finished), style="dim")


def _answer(request: RerankRequest, options: EngineOptions, *, quiet: bool) -> Finished[RerankResult]:
    def run(engine: ScoringEngine, on_progress: OnProgress | None) -> RerankResult:
        from prefixwise.engine.reranker import Reranker

        return Reranker(engine).rerank(request, on_progress)

    return run_request(options, request.num_items, run, quiet=quiet)
