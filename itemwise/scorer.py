"""The front door for Python users: `Scorer(model).score(query, items, labels=...)`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from itemwise.backends.base import BackendOptions, Warmup
from itemwise.backends.load import load_backend
from itemwise.contract.errors import TokenizerError
from itemwise.contract.parse import parse_score_request
from itemwise.contract.request import Algorithm, LabelScoring, OnItemError, ScoreMode, Tokenization
from itemwise.contract.result import ScoreResult
from itemwise.engine.engine import EngineConfig, ScoringEngine
from itemwise.engine.executor import OnProgress
from itemwise.engine.warmup import OnProgram, warm_up
from itemwise.models.checkpoint import Checkpoint, open_checkpoint
from itemwise.plan.options import MaskOption, PlanOptions
from itemwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("itemwise")

TextOrIds = str | Sequence[int]


class Scorer:
    """A model, loaded once. Use it as a context manager, or call `close()`.

    `model` is a folder in Hugging Face's layout, a `.gguf` file or a hub id; None is the embedded model,
    SmolLM2-135M-Instruct.
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
        prefix_cache_bytes: int | None = None,
        algorithm: Algorithm = "auto",
        mask: MaskOption = "auto",
        segment_fallback_threshold: int = 32_768,
        chunk_size: int | None = None,
        token_budget: int | None = None,
        delimiter_token_id: int | None = None,
        max_items_per_request: int = 100_000,
        on_program: OnProgram | None = None,
    ) -> None:
        plan = PlanOptions(
            algorithm=algorithm,
            mask=mask,
            segment_fallback_threshold=segment_fallback_threshold,
            chunk_size=chunk_size,
            token_budget=token_budget,
        )
        options = BackendOptions(
            backend=backend,
            device=device,
            dtype=dtype,
            tp_size=tp_size,
            dp_size=dp_size,
            batch_invariant=batch_invariant,
            token_budget=token_budget,
            attention=attention,
            prefix_cache_bytes=prefix_cache_bytes,
            compilation_cache_dir=None if compilation_cache_dir is None else str(compilation_cache_dir),
            warmup=warmup,
        )
        checkpoint = open_checkpoint(model)
        config = EngineConfig(checkpoint.name, delimiter_token_id, max_items_per_request, plan)
        self.engine = ScoringEngine(config, load_backend(checkpoint, options), _read_tokenizer(checkpoint))
        if warmup != "none":
            warm_up(self.engine, on_program)

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
        }
        return self.engine.score(parse_score_request(body), on_progress)

    def close(self) -> None:
        """Give the device's memory back."""
        self.engine.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_tokenizer(checkpoint: Checkpoint) -> TextTokenizer | None:
    """None for a model without one: token ids can still be scored, and text gets an error that says so."""
    try:
        return TextTokenizer(checkpoint.read_tokenizer_files())
    except TokenizerError as error:
        log.info("only token ids can be scored: %s", error)
        return None
