"""Classification and embedding: whole inputs through the engine, to classes or to hidden states.

ClassifyRequest -> prompt -> PreparedRequest -> engine -> ClassifyResult, EmbedResult
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from prefixwise.contract.checks import check_item_count, check_score_count
from prefixwise.contract.classify import ClassifyRequest
from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.result import Classification, ClassifyResult, EmbedResult
from prefixwise.contract.scores import class_scores
from prefixwise.engine.engine import OnProgress, ScoringEngine
from prefixwise.engine.prepare import MAX_SCORES_PER_REQUEST, PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.prompts.inputs import build_inputs

_NO_QUERY = np.zeros(0, np.int32)


class Classifier:
    """Classifies inputs with the head of a classifier, and embeds them with any model."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._model = engine.backend.config

    def classify(self, request: ClassifyRequest, on_progress: OnProgress | None = None) -> ClassifyResult:
        """Classify and wait. Raises RequestError, before any device work, if the request cannot be served."""
        prepared = self.prepare(request)
        state = self._engine.run(prepared, on_progress)
        return self.finish(prepared, state, use_activation=request.use_activation)

    def embed(self, request: ClassifyRequest, on_progress: OnProgress | None = None) -> EmbedResult:
        """Embed and wait. Raises RequestError, before any device work, if the request cannot be served."""
        prepared = self.prepare_embedding(request)
        return self.finish_embedding(prepared, self._engine.run(prepared, on_progress))

    def prepare(self, request: ClassifyRequest) -> PreparedRequest:
        """Raises RequestError, or TokenizerError for text without a tokenizer."""
        if not self._model.num_classes:
            message = (
                "this model is not a classifier: it has no classes, but logits of tokens; expected a request to score "
                "with labels (/v1/score)"
            )
            raise InvalidValueError(message, code="not_a_classifier")
        return self._prepare(request, embeds=False)

    def prepare_embedding(self, request: ClassifyRequest) -> PreparedRequest:
        """Raises RequestError, or TokenizerError for text without a tokenizer."""
        return self._prepare(request, embeds=True)

    def _prepare(self, request: ClassifyRequest, *, embeds: bool) -> PreparedRequest:
        begin = perf_counter()
        check_item_count(request.num_items, self._engine.config.max_items_per_request, "input")
        rows = tuple((row,) for row in range(self._model.num_classes)) or ((0,),)  # the plan reads one logit at least
        prompt = build_inputs(request, self._engine.tokenizer, self._model, rows)
        scoring = ScoreRequest(
            query=_NO_QUERY,
            items=prompt.sequences,
            label_token_ids=rows,
            score_mode="logit",
            return_pooled_hidden_states=embeds,
        )
        check_score_count(scoring, MAX_SCORES_PER_REQUEST, self._model.model_size)
        return self._engine.prepare_prompt(scoring, prompt, begin)

    def finish(self, prepared: PreparedRequest, state: RequestState, *, use_activation: bool) -> ClassifyResult:
        """The result of a request that is done. Raises the error that ended it."""
        scored, labels = self._engine.finish(prepared, state, as_rows=True), self._model.class_labels
        logits = np.array(scored.rows, np.float64)
        numbers = class_scores(self._model.class_activation, logits) if use_activation else logits
        best = logits.argmax(1)  # logits: activations may be rounded to 1
        results = [
            Classification(index, labels[best_row], probs)
            for index, (best_row, probs) in enumerate(zip(best.tolist(), numbers.tolist(), strict=True))
        ]
        return ClassifyResult(results, labels, scored.model, scored.usage, scored.truncated)

    def finish_embedding(self, prepared: PreparedRequest, state: RequestState) -> EmbedResult:
        """The result of a request that is done. Raises the error that ended it."""
        result = self._engine.finish(prepared, state, as_rows=True)
        states = [hidden for hidden in result.pooled_hidden_states or () if hidden is not None]
        return EmbedResult(np.stack(states), result.model, result.usage, result.truncated)
