"""`Reranker`: a rerank request is a scoring request with a profile's prompt before it and a sort after it.

prepare   on the caller's thread: the profile builds the prompts
finish    on the caller's thread: logits to relevance, documents best first
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.checks import check_item_count
from prefixwise.contract.errors import InvalidValueError, ProfileError, TokenizerError
from prefixwise.contract.ragged import Int32Array, Int64Array, starts_from_lens
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankedDocument, RerankResult
from prefixwise.contract.scores import needed_score_mode, raw_scores, relevance_scores
from prefixwise.engine.engine import OnProgress, ScoringEngine
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.prompts.profile import Profile
from prefixwise.prompts.profile_choice import DEFAULT, fitting_profile, profile_of
from prefixwise.prompts.rerank import RerankPrompts


@dataclass(frozen=True, eq=False)
class PreparedRerank:
    """A rerank request and its scoring request, prepared."""

    request: RerankRequest
    profile: Profile
    scoring: PreparedRequest  # its items are documents, or chunks of them
    owners: Int64Array  # [items]: index of the document


class Reranker:
    """Sorts documents by relevance, with the profile of the model or the one that a request names."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._choice = engine.config.profiles
        self._prompts: dict[str, RerankPrompts] = {}

    def rerank(self, request: RerankRequest, on_progress: OnProgress | None = None) -> RerankResult:
        """Rerank and wait. Raises RequestError, before any device work, if the request cannot be scored."""
        prepared = self.prepare(request)
        return self.finish(prepared, self._engine.run(prepared.scoring, on_progress))

    def prepare(self, request: RerankRequest) -> PreparedRerank:
        """Raises RequestError if the request cannot be scored, TokenizerError if the model has no tokenizer."""
        begin = perf_counter()
        check_item_count(request.num_items, self._engine.config.max_items_per_request, request.documents_field)
        prompts = self._prompts_of(request.profile)
        made = prompts.prompt(request)
        self._check_num_chunks(len(made.owners))
        scoring = ScoreRequest(
            query=made.prompt.prefix_ids,
            items=made.prompt.sequences,
            label_token_ids=made.prompt.label_ids,
            score_mode=needed_score_mode(prompts.profile.kind),
            algorithm=request.algorithm,
            return_debug=request.return_debug,
            debug_top_k=request.debug_top_k,
            model=request.model,
        )
        prepared = self._engine.prepare_prompt(scoring, made.prompt, begin)
        return PreparedRerank(request, prompts.profile, prepared, made.owners)

    def finish(self, prepared: PreparedRerank, state: RequestState) -> RerankResult:
        """The result of a request that is done. Raises the error that ended it."""
        request = prepared.request
        scored = self._engine.finish(prepared.scoring, state, as_rows=True)
        rows = np.array(scored.rows, np.float64)
        raw = _best_chunks(raw_scores(rows, prepared.profile.temperature), prepared.owners)
        relevance = relevance_scores(prepared.profile.kind, raw)
        order = np.argsort(-raw, kind="stable")[: request.top_n]  # raw scores: relevance may be rounded to 1
        results = [
            RerankedDocument(index, request.documents[index], float(relevance[index]), float(raw[index]))
            for index in order.tolist()
        ]
        return RerankResult(
            results=results,
            model=scored.model,
            profile=prepared.profile.name,
            usage=scored.usage,
            truncated=scored.truncated,
            warnings=(*request.warnings, *self.profile_warnings(prepared)),
            debug=scored.debug,
        )

    def prepare_prefix(self, query: str, profile: str | None, instruction: str | None) -> Int32Array:
        """The tokens that rerank requests with this query share. Raises RequestError."""
        return self._engine.check_prefix(self._prompts_of(profile).prefix(query, instruction))

    def _check_num_chunks(self, num_chunks: int) -> None:
        max_items = self._engine.config.max_items_per_request
        if num_chunks > max_items:
            raise InvalidValueError(
                f"documents and their chunks must be at most {max_items} (max_items_per_request), got {num_chunks}; "
                "lower max_chunks_per_doc, or send several smaller requests",
                code="too_many_items",
                param="max_chunks_per_doc",
            )

    def profile_warnings(self, prepared: PreparedRerank) -> tuple[str, ...]:
        """Reasons in model and profile why the scores may be poor. They hold no text of the request."""
        profile, family = prepared.profile, self._engine.backend.config.family
        warnings = []
        if prepared.request.profile in (None, DEFAULT) and self._choice.warning is not None:
            warnings.append(self._choice.warning)
        if profile.families and family not in profile.families:
            known = " and ".join(profile.families)
            warnings.append(f"profile {profile.name} is for {known} models, and this one is of the family {family}")
        return tuple(warnings)

    def _prompts_of(self, name: str | None) -> RerankPrompts:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise TokenizerError("this model has no tokenizer, so documents cannot be read; send ids to /v1/score")
        try:
            profile = fitting_profile(profile_of(self._choice, name), self._choice.by_name, tokenizer)
            if profile.name not in self._prompts:
                self._prompts[profile.name] = RerankPrompts(profile, tokenizer, self._engine.backend.config)
        except ProfileError as error:
            raise InvalidValueError(str(error), code="invalid_profile", param="profile") from None
        return self._prompts[profile.name]


def _best_chunks(raw: NDArray[np.float64], owners: Int64Array) -> NDArray[np.float64]:
    """[documents] of [items]: a document is as relevant as its best chunk."""
    starts = starts_from_lens(np.bincount(owners))[:-1]
    return np.maximum.reduceat(raw, starts)
