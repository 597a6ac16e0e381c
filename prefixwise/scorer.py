"""The front door for Python users: `Scorer(model).score(query, items, labels=...)`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.parse_rerank import parse_rerank_request
from prefixwise.contract.request import Algorithm, LabelScoring, OnItemError, ScoreMode, Tokenization
from prefixwise.contract.rerank import RerankResult, TruncationSide
from prefixwise.contract.result import ScoreResult
from prefixwise.engine.engine import OnProgress
from prefixwise.engine.reranker import Reranker
from prefixwise.engine.warmup import OnProgram
from prefixwise.forward.backend import Warmup
from prefixwise.launch.loading import load_engine
from prefixwise.launch.options import EngineOptions
from prefixwise.plan.options import MaskOption

TextOrIds = str | Sequence[int]


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
            max_queued_tokens=sys.maxsize,  # a queue's bound protects a server; a scorer's callers are its own
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
        weakref.finalize(self, self.engine.close)  # a scorer that is forgotten must not keep its model

    def score(
        self,
        query: TextOrIds,
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        labels: Sequence[str] | None = None,
        label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        apply_softmax: bool | None = None,
        item_first: bool = False,
        score_mode: ScoreMode | None = None,
        label_scoring: LabelScoring = "single",
        tokenization: Tokenization = "apart",
        suffix: TextOrIds | None = None,
        max_tokens_per_item: int | None = None,
        algorithm: Algorithm = "auto",
        on_item_error: OnItemError = "fail",
        return_debug: bool = False,
        debug_top_k: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> ScoreResult:
        """The probability of the labels after each item. Same request, errors and engine as `/v1/score`."""
        body = {
            "query": query,
            "items": items,
            "labels": labels,
            "label_token_ids": label_token_ids,
            "apply_softmax": apply_softmax,
            "item_first": item_first,
            "score_mode": score_mode,
            "label_scoring": label_scoring,
            "tokenization": tokenization,
            "suffix": suffix,
            "max_tokens_per_item": max_tokens_per_item,
            "algorithm": algorithm,
            "on_item_error": on_item_error,
            "return_debug": return_debug,
            "debug_top_k": debug_top_k,
        }
        return self.engine.score(parse_score_request(body), on_progress)

    def rerank(
        self,
        query: str,
        documents: Sequence[str] | Sequence[Mapping[str, str]],
        *,
        top_n: int | None = None,
        profile: str | None = None,
        instruction: str | None = None,
        max_tokens_per_doc: int | None = None,
        max_chunks_per_doc: int | None = None,
        truncate: bool = True,
        truncation_side: TruncationSide = "right",
        algorithm: Algorithm = "auto",
        return_debug: bool = False,
        debug_top_k: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> RerankResult:
        """The documents best first, by the profile of the model or the one named. Same as `/v1/rerank`."""
        body = {
            "query": query,
            "documents": documents,
            "top_n": top_n,
            "profile": profile,
            "instruction": instruction,
            "max_tokens_per_doc": max_tokens_per_doc,
            "max_chunks_per_doc": max_chunks_per_doc,
            "truncate": truncate,
            "truncation_side": truncation_side,
            "algorithm": algorithm,
            "return_debug": return_debug,
            "debug_top_k": debug_top_k,
        }
        return self.reranker.rerank(parse_rerank_request(body), on_progress)

    def close(self) -> None:
        """Give the device's memory back; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
