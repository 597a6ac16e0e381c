"""Classification and embedding: whole inputs through the engine, to classes or to hidden states.

ClassifyRequest -> prompt -> PreparedRequest -> engine -> ClassifyResult, EmbedResult

A guard has no classes in its head: its answers give the probability that an input is unsafe, by category.
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
from prefixwise.prompts.guard import GuardKind, build_guard_prompt, guard_form
from prefixwise.prompts.inputs import build_inputs

_NO_QUERY = np.zeros(0, np.int32)
_UNSAFE = 0.5  # the probability from which on a guard's label is a category
_LOG_ODDS_BOUNDS = (1e-300, 1 - 2**-53)  # beyond them log-odds are infinite, which JSON does not have


class Classifier:
    """Classifies inputs with the head of a classifier or by a guard's answers, and embeds them with any model."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._model = engine.backend.config
        self._guard = None if self._model.num_classes else engine.config.profiles.guard

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
        if self._guard is not None:
            return self._prepare_guard(request, self._guard)
        if not self._model.num_classes:
            message = (
                "this model is not a classifier: it has no classes, but logits of tokens; expected a request to score "
                "with labels (/v1/score)"
            )
            raise InvalidValueError(message, code="not_a_classifier")
        if request.query is not None:
            message = "query is for guards, and this model is a classifier of whole inputs"
            raise InvalidValueError(message, code="conflicting_parameters", param="query")
        return self._prepare(request, embeds=False)

    def prepare_embedding(self, request: ClassifyRequest) -> PreparedRequest:
        """Raises RequestError, or TokenizerError for text without a tokenizer."""
        return self._prepare(request, embeds=True)

    def _prepare_guard(self, request: ClassifyRequest, kind: GuardKind) -> PreparedRequest:
        begin = perf_counter()
        tokenizer = self._engine.tokenizer
        form = guard_form(kind, request.query, tokenizer)
        check_item_count(request.num_items * len(form.afters), self._engine.config.max_items_per_request, "input")
        assert tokenizer is not None, "`guard_form` raises without one"
        prompt = build_guard_prompt(request, form, tokenizer, self._model)
        scoring = ScoreRequest(
            query=prompt.prefix_ids,
            items=prompt.sequences,
            label_token_ids=prompt.label_ids,
            score_mode="logprob" if form.reads_sequences else "logit",
            label_scoring="sequence" if form.reads_sequences else "single",
            model=request.model,
        )
        check_score_count(scoring, MAX_SCORES_PER_REQUEST, self._model.model_size)
        return self._engine.prepare_prompt(scoring, prompt, begin)

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
            model=request.model,
        )
        check_score_count(scoring, MAX_SCORES_PER_REQUEST, self._model.model_size)
        return self._engine.prepare_prompt(scoring, prompt, begin)

    def finish(self, prepared: PreparedRequest, state: RequestState, *, use_activation: bool) -> ClassifyResult:
        """The result of a request that is done. Raises the error that ended it."""
        if self._guard is not None:
            return self._finish_guard(prepared, state, self._guard, use_activation=use_activation)
        scored, labels = self._engine.finish(prepared, state, as_rows=True), self._model.class_labels
        logits = np.array(scored.rows, np.float64)
        numbers = class_scores(self._model.class_activation, logits) if use_activation else logits
        best = logits.argmax(1)  # logits: activations may be rounded to 1
        results = [
            Classification(index, labels[best_row], probs)
            for index, (best_row, probs) in enumerate(zip(best.tolist(), numbers.tolist(), strict=True))
        ]
        return ClassifyResult(results, labels, scored.model, scored.usage, scored.truncated)

    def _finish_guard(
        self, prepared: PreparedRequest, state: RequestState, kind: GuardKind, *, use_activation: bool
    ) -> ClassifyResult:
        """The label is `safe`, or from a probability of one half on the most likely category."""
        scored = self._engine.finish(prepared, state, as_rows=True)
        form = guard_form(kind, None, self._engine.tokenizer)
        probs = form.probabilities(np.array(scored.rows, np.float64))
        best = probs[:, 1:].argmax(axis=1)
        labels = [form.categories[at] if row[0] >= _UNSAFE else "safe" for at, row in zip(best, probs, strict=True)]
        bounded = np.clip(probs, *_LOG_ODDS_BOUNDS)
        numbers = probs if use_activation else np.log(bounded) - np.log1p(-bounded)
        results = [
            Classification(index, label, row)
            for index, (label, row) in enumerate(zip(labels, numbers.tolist(), strict=True))
        ]
        return ClassifyResult(results, form.classes, scored.model, scored.usage, scored.truncated)

    def finish_embedding(self, prepared: PreparedRequest, state: RequestState) -> EmbedResult:
        """The result of a request that is done. Raises the error that ended it."""
        result = self._engine.finish(prepared, state, as_rows=True)
        states = [hidden for hidden in result.pooled_hidden_states or () if hidden is not None]
        return EmbedResult(np.stack(states), result.model, result.usage, result.truncated)
