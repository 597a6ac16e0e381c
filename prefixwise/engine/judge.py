"""`Judge`: a judge request is a scoring request whose labels are answers, with a distribution behind it.

prepare   on the caller's thread: the chat template renders the messages, items are put into their place
finish    on the caller's thread: log-probabilities to distributions
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from prefixwise.contract.checks import check_item_count, check_score_count
from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.judge import JudgeRequest
from prefixwise.contract.judge_result import Distributions, Judgement, JudgeResult, distributions, next_longer
from prefixwise.contract.request import ScoreRequest
from prefixwise.engine.engine import OnProgress, ScoringEngine
from prefixwise.engine.prepare import MAX_SCORES_PER_REQUEST, PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.prompts.judge import build_judge_prompt


@dataclass(frozen=True, eq=False)
class PreparedJudge:
    """A judge request and its scoring request, prepared."""

    request: JudgeRequest
    scoring: PreparedRequest


class Judge:
    """Judges items, or a chat, by the probabilities of a few answers."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._model = engine.backend.config

    def judge(self, request: JudgeRequest, on_progress: OnProgress | None = None) -> JudgeResult:
        """Judge and wait. Raises RequestError, before any device work, if the request cannot be served."""
        prepared = self.prepare(request)
        return self.finish(prepared, self._engine.run(prepared.scoring, on_progress))

    def prepare(self, request: JudgeRequest) -> PreparedJudge:
        """Raises RequestError, or TokenizerError if the model has no tokenizer."""
        begin = perf_counter()
        if self._model.num_classes:
            message = "this model is a classifier, which has no logits of answers: expected a model that chats"
            raise InvalidValueError(message, code="no_label_logits")
        check_item_count(request.num_items, self._engine.config.max_items_per_request)
        prompt, warnings = build_judge_prompt(request, self._engine.tokenizer, self._model)
        scoring = ScoreRequest(
            query=prompt.prefix_ids,
            items=prompt.sequences,
            labels=request.answers,
            score_mode="logprob",
            label_scoring="sequence",
            algorithm=request.algorithm,
            return_debug=request.return_debug,
            debug_top_k=request.debug_top_k,
            warnings=(*request.warnings, *warnings),
            model=request.model,
        )
        check_score_count(scoring, MAX_SCORES_PER_REQUEST, self._model.model_size)
        return PreparedJudge(request, self._engine.prepare_prompt(scoring, prompt, begin))

    def finish(self, prepared: PreparedJudge, state: RequestState) -> JudgeResult:
        """The result of a request that is done. Raises the error that ended it."""
        request = prepared.request
        scored = self._engine.finish(prepared.scoring, state, as_rows=True)
        logprobs = np.array(scored.rows, np.float64)
        found = distributions(logprobs, next_longer(prepared.scoring.prompt.label_ids), request.values)
        return JudgeResult(
            results=_judgements(request, found),
            answers=request.answers,
            model=scored.model,
            usage=scored.usage,
            truncated=scored.truncated,
            warnings=scored.warnings,
            debug=scored.debug,
        )


def _judgements(request: JudgeRequest, found: Distributions) -> list[Judgement]:
    expected = [None] * request.num_items if found.expected is None else found.expected.tolist()
    rows = zip(
        request.items or (None,),
        found.probs.argmax(axis=1).tolist(),
        found.probs.tolist(),
        expected,
        found.entropy.tolist(),
        found.mass.tolist(),
        strict=True,
    )
    return [
        Judgement(index, item, request.answers[best], probs, value, entropy, mass)
        for index, (item, best, probs, value, entropy, mass) in enumerate(rows)
    ]
