"""The front door for Python users: `Scorer(model).score(query, items, labels=...)`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack

from prefixwise.contract.classify import CLASSIFY_FIELDS, ClassifyOptions, EmbedOptions, parse_classify_request
from prefixwise.contract.fields import with_fields
from prefixwise.contract.parse import parse_rerank_request, parse_score_request
from prefixwise.contract.request import SCORE_FIELDS, Algorithm, ScoreOptions, TextOrIds
from prefixwise.contract.rerank_request import RerankOptions, rerank_fields
from prefixwise.contract.result import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.engine import OnProgress
from prefixwise.engine.reranker import Reranker
from prefixwise.forward.backend import Warmup
from prefixwise.launch.loading import OnProgram, load_engine
from prefixwise.launch.options import EngineOptions
from prefixwise.plan.algorithms import MaskOption


class Scorer:
    """A model, loaded once. Use it as a context manager, or call `close()`.

    `model` is a folder in Hugging Face's layout, a `.gguf` file or a hub id; None is the embedded model,
    SmolLM2-135M-Instruct. `prefixwise.launch.options.EngineOptions` explains the other options.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        tp_size: int = 1,
        dp_size: int = 1,
        batch_invariant: bool = False,
        attention: str | None = None,
        warmup: Warmup = "none",
        compilation_cache_dir: str | Path | None = None,
        weight_cache: bool = True,
        prefix_cache_bytes: int | None = None,
        prefix_cache: bool = True,
        chunked_prefill_size: int | None = None,
        algorithm: Algorithm = "auto",
        mask: MaskOption = "auto",
        segment_fallback_threshold: int = 32_768,
        chunk_size: int | None = None,
        token_budget: int | None = None,
        delimiter_token_id: int | None = None,
        max_items_per_request: int = 100_000,
        profile: str | Path | None = None,
        on_program: OnProgram | None = None,
    ) -> None:
        options = EngineOptions(
            model=model,
            backend=backend,
            device=device,
            dtype=dtype,
            tp_size=tp_size,
            dp_size=dp_size,
            batch_invariant=batch_invariant,
            attention=attention,
            warmup=warmup,
            compilation_cache_dir=compilation_cache_dir,
            weight_cache=weight_cache,
            prefix_cache_bytes=prefix_cache_bytes,
            prefix_cache=prefix_cache,
            chunked_prefill_size=chunked_prefill_size,
            max_queued_tokens=sys.maxsize,  # a bound of the queue protects servers, not a process from itself
            algorithm=algorithm,
            mask=mask,
            segment_fallback_threshold=segment_fallback_threshold,
            chunk_size=chunk_size,
            token_budget=token_budget,
            delimiter_token_id=delimiter_token_id,
            max_items_per_request=max_items_per_request,
            profile=profile,
        )
        self.engine = load_engine(options, on_program)
        self.reranker = Reranker(self.engine)
        self.classifier = Classifier(self.engine)
        weakref.finalize(self, self.engine.close)  # frees the model of a scorer that nobody closed

    @with_fields(SCORE_FIELDS, ScoreOptions)
    def score(
        self,
        query: TextOrIds,
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Score the labels after each item. Same request, errors and engine as `/v1/score`.

        `on_progress` is called with the number of scored items, and with the number of all items.
        """
        return self.engine.score(parse_score_request({"query": query, "items": items, **options}), on_progress)

    @with_fields(rerank_fields("native"), RerankOptions)
    def rerank(
        self,
        query: str,
        documents: Sequence[str] | Sequence[Mapping[str, str]],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[RerankOptions],
    ) -> RerankResult:
        """Order documents by their relevance to the query, best first. Same request and errors as `/v1/rerank`.

        `on_progress` is called with the number of scored documents, and with the number of all documents.
        """
        body = {"query": query, "documents": documents, **options}
        return self.reranker.rerank(parse_rerank_request(body), on_progress)

    @with_fields(CLASSIFY_FIELDS[1:], ClassifyOptions)
    def classify(
        self,
        inputs: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> ClassifyResult:
        """Classify whole inputs with a classifier's head. Same request and errors as `/classify`.

        `inputs` is one text, several, or the token ids of either. `Scorer.score` without labels gives the logits of
        items behind a shared query.
        """
        return self.classifier.classify(parse_classify_request({"input": inputs, **options}), on_progress)

    @with_fields(CLASSIFY_FIELDS[2:], EmbedOptions)
    def embed(
        self,
        inputs: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[EmbedOptions],
    ) -> EmbedResult:
        """The hidden state after the last token of each input, after the final norm; any model has it.

        `inputs` is one text, several, or the token ids of either. `Scorer.score` with return_pooled_hidden_states gives
        those of items behind a shared query.
        """
        return self.classifier.embed(parse_classify_request({"input": inputs, **options}), on_progress)

    def close(self) -> None:
        """Give the device's memory back; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
