"""`ScoringEngine`: a request's whole walk, from contract to result. `Scorer` and the server stand on it.

prepare   on the caller's thread: check, tokenize, plan
submit    to the scheduler, which calls back
finish    on the caller's thread: logits to scores
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import InternalError, InvalidValueError, RequestError
from prefixwise.contract.ragged import Int32Array, Int64Array, numbers
from prefixwise.contract.request import (
    ScoreRequest,
    check_item_count,
    check_model,
    check_score_count,
    check_vocabulary,
)
from prefixwise.contract.result import ItemError, ScoreResult, Usage
from prefixwise.contract.score_modes import needs_logsumexp, scores_from_logits, scores_from_logprobs
from prefixwise.contract.token_ids import Place, vocabulary_error
from prefixwise.engine.debug import debug_block, inspected_item
from prefixwise.engine.job import Job, OnChange
from prefixwise.engine.pins import PinnedPrefix
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import Backend
from prefixwise.plan.algorithms import Planner, ScorePlan
from prefixwise.plan.label_rows import LabelRows, lay_out_segments, plan_labels, with_vocabulary
from prefixwise.plan.options import PlanOptions
from prefixwise.plan.shared_prefix import split_items
from prefixwise.prompts.limits import check_limits
from prefixwise.prompts.profile_choice import ProfileChoice, profile_of_any_model
from prefixwise.prompts.template import Prompt, build_prefix, build_prompt
from prefixwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("prefixwise")

OnProgress = Callable[[int, int], None]  # items done, items in all

MAX_SCORES_PER_REQUEST = 10_000_000  # items x labels: about 200 MB of JSON

_NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class EngineConfig:
    """What holds for every request."""

    model_name: str
    delimiter_token_id: int | None = None
    max_items_per_request: int = 100_000
    plan: PlanOptions = field(default_factory=PlanOptions)
    served_names: tuple[str, ...] = ()  # other names that a request may call the model by
    profiles: ProfileChoice = field(default_factory=profile_of_any_model)  # how documents become prompts


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request with all that the host has to do before it runs."""

    request: ScoreRequest
    prompt: Prompt
    labels: LabelRows
    item_errors: dict[int, RequestError]
    good: Int64Array  # the items that can be scored
    plan: ScorePlan | None  # None where there are none
    begin: float  # of time.perf_counter()
    tokenize_seconds: float

    @property
    def num_items(self) -> int:
        return self.request.num_items


class ScoringEngine:
    """A model that is ready to score, for any number of threads."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, tokenizer: TextTokenizer | None) -> None:
        backend = scheduler.backend
        _check_delimiter_id(config.delimiter_token_id, backend.config.vocab_size)
        self.config = config
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.planner = Planner(
            backend.config,
            backend.info,
            config.plan.resolve(backend.info),
            keeps_prefixes=scheduler.options.prefix_cache,
        )

    @property
    def backend(self) -> Backend:
        return self.scheduler.backend

    def score(self, request: ScoreRequest, on_progress: OnProgress | None = None) -> ScoreResult:
        """Score one request, and wait. Raises RequestError before any work where it cannot be scored."""
        prepared = self.prepare(request)
        return self.finish(prepared, self.run(prepared, on_progress))

    def run(self, prepared: PreparedRequest, on_progress: OnProgress | None = None) -> Job:
        """Submit it, and wait until it is done."""
        changes: SimpleQueue[None] = SimpleQueue()
        job = self.submit(prepared, on_change=lambda: changes.put(None))
        try:
            while not job.is_done:
                changes.get()
                if on_progress is not None and prepared.plan is not None and job.num_items_done:
                    on_progress(job.num_items_done, len(prepared.good))
        except BaseException:
            job.cancel()
            raise
        return job

    def prepare(self, request: ScoreRequest) -> PreparedRequest:
        """Raises RequestError where the request cannot be scored, TokenizerError for text that no tokenizer reads."""
        begin = perf_counter()
        self._check_head()
        request = self._check(request)
        return self.prepare_prompt(
            request, build_prompt(request, self.tokenizer, self.config.delimiter_token_id), begin
        )

    def prepare_prompt(self, request: ScoreRequest, prompt: Prompt, begin: float) -> PreparedRequest:
        """The same for a prompt that was made elsewhere, since `begin` of time.perf_counter()."""
        tokenize_seconds = perf_counter() - begin
        _check_inspection(request)
        labels = plan_labels(prompt.label_ids)
        item_errors = self._item_errors(request, prompt, labels)
        good = numbers(request.num_items)
        if item_errors:
            good = np.array([i for i in range(request.num_items) if i not in item_errors], np.int64)
        plan = self._plan(request, prompt, labels, good) if len(good) else None
        return PreparedRequest(request, prompt, labels, item_errors, good, plan, begin, tokenize_seconds)

    def submit(
        self,
        prepared: PreparedRequest,
        *,
        deadline: float | None = None,
        on_change: OnChange | None = None,
        priority: int = 0,
    ) -> Job:
        """Queue it. `deadline`: of time.monotonic(). `on_change`: called by the scheduler's thread when items are done
        or the job is. `priority`: lower ones are served first. Raises QueueFullError."""
        plan, request = prepared.plan, prepared.request
        job = Job(
            plan.segments.prefix_ids if plan is not None and plan.needs_prefill else _NO_IDS,
            plan,
            normalize=needs_logsumexp(request.score_mode, request.label_scoring),
            timed=request.return_debug,
            deadline=deadline,
            on_change=on_change,
            priority=priority,
        )
        if plan is None:
            job.finish()
        else:
            self.scheduler.submit(job)
        return job

    def finish(self, prepared: PreparedRequest, job: Job) -> ScoreResult:
        """The scores of a job that is done. Raises what went wrong."""
        if job.error is not None:
            raise job.error
        if prepared.plan is None:
            return self._result(prepared, job, np.zeros((0, 1)), None)
        scores = _scores(prepared, job)
        _check_finite(scores, prepared.good)
        debug = self._debug(prepared, prepared.plan, job) if prepared.request.return_debug else None
        return self._result(prepared, job, scores, debug)

    def prepare_prefix(self, query: str | Int32Array) -> Int32Array:
        """The tokens that requests with this query share. Raises RequestError where no request could have it."""
        return self.check_prefix(build_prefix(query, self.tokenizer, self.config.delimiter_token_id))

    def check_prefix(self, prefix_ids: Int32Array) -> Int32Array:
        """The same tokens. Raises RequestError where they cannot be kept."""
        if not self.scheduler.options.prefix_cache:
            message = "prefixes are not kept between requests here (the prefix cache is off)"
            raise InvalidValueError(message, code="prefix_cache_disabled")
        _check_prefix(prefix_ids, self.backend)
        return prefix_ids

    def submit_prefix(
        self,
        prefix_ids: Int32Array,
        *,
        ttl_seconds: float,
        deadline: float | None = None,
        on_change: OnChange | None = None,
    ) -> Job:
        """Compute the prefix and keep it for so long. Raises QueueFullError."""
        job = Job(prefix_ids, None, deadline=deadline, on_change=on_change, pin_seconds=ttl_seconds)
        self.scheduler.submit(job)
        return job

    def finish_prefix(self, job: Job) -> PinnedPrefix:
        """What a prefix job that is done has kept. Raises what went wrong."""
        if job.error is not None:
            raise job.error
        assert job.pinned is not None, "a prefix job that is done has pinned it"
        return job.pinned

    def release_prefix(self, prefix_id: str) -> bool:
        """False where there is none of this id."""
        return self.scheduler.release_pin(prefix_id)

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        return self.scheduler.pins.listed()

    def close(self) -> None:
        """Give the device's memory back, after what has been started; a second call does nothing."""
        self.scheduler.close()

    def _check_head(self) -> None:
        """Raises where the model has no logits of tokens."""
        if self.backend.config.num_classes:
            message = (
                "this model is a classifier, which has no logits of label tokens; expected a request to rerank, "
                "got one to score"
            )
            raise InvalidValueError(message, code="no_label_logits")

    def _check(self, request: ScoreRequest) -> ScoreRequest:
        check_model(request, (self.config.model_name, *self.config.served_names))
        check_item_count(request.num_items, self.config.max_items_per_request)
        check_score_count(request, MAX_SCORES_PER_REQUEST)
        return check_vocabulary(request, self.backend.config.vocab_size)

    def _item_errors(self, request: ScoreRequest, prompt: Prompt, labels: LabelRows) -> dict[int, RequestError]:
        """The errors of all items that cannot be scored; raises the first unless they are to be reported."""
        report = request.on_item_error == "report"
        beyond = check_limits(prompt, self.backend.config, label_tokens=labels.longest_stem, report=report)
        return {**prompt.item_errors, **beyond}

    def _plan(self, request: ScoreRequest, prompt: Prompt, labels: LabelRows, good: Int64Array) -> ScorePlan:
        split = split_items(prompt.take(good))
        if request.debug_top_k is not None:
            labels = with_vocabulary(labels, self._num_next_tokens)
        plan = self.planner.plan(lay_out_segments(split, labels), request.algorithm)
        log.log(logging.INFO if plan.is_fallback else logging.DEBUG, "%s: %s", plan.algorithm, plan.reason)
        if plan.mask_note:
            log.info("%s with mask %s: %s", plan.algorithm, plan.mask, plan.mask_note)
        return plan

    @property
    def _num_next_tokens(self) -> int:
        """A classifier has none."""
        config = self.backend.config
        return 0 if config.num_classes else config.vocab_size

    def _debug(self, prepared: PreparedRequest, plan: ScorePlan, job: Job) -> dict[str, object]:
        block = debug_block(plan, job, begin=prepared.begin, tokenize_seconds=prepared.tokenize_seconds)
        top_k = prepared.request.debug_top_k
        if top_k is not None:
            of_vocabulary = job.label_logits[0, prepared.labels.num_labels :]
            block["item"] = inspected_item(plan, prepared.prompt, of_vocabulary, top_k, self.tokenizer)
        return block

    def _result(
        self, prepared: PreparedRequest, job: Job, scores: NDArray[np.float64], debug: dict[str, object] | None
    ) -> ScoreResult:
        request, prompt, item_errors = prepared.request, prepared.prompt, prepared.item_errors
        rows: list[list[float] | None] = scores.tolist()
        if item_errors:
            rows = [None] * request.num_items
            for index, row in zip(prepared.good.tolist(), scores.tolist(), strict=True):
                rows[index] = row
        names = request.labels or tuple(" ".join(map(str, ids)) for ids in prompt.label_ids)
        return ScoreResult(
            scores=rows,
            items=request.items,
            labels=names,
            score_mode=request.score_mode,
            model=self.config.model_name,
            usage=Usage(prompt.prompt_tokens, job.cached_tokens),
            truncated=prompt.truncated,
            item_errors=tuple(ItemError.from_error(i, item_errors[i]) for i in sorted(item_errors)),
            debug=debug,
        )


def _check_prefix(prefix_ids: Int32Array, backend: Backend) -> None:
    """Raises where it is longer than the model, or than what can be kept."""
    longest = min(backend.config.max_context_len, backend.info.max_prefix_len)
    if len(prefix_ids) > longest:
        message = f"query must have at most {longest} tokens, got {len(prefix_ids)}"
        raise InvalidValueError(message, code="context_too_long", param="query")
    beyond = prefix_ids[prefix_ids >= backend.config.vocab_size]
    if len(beyond):
        place = Place("query", "query")
        raise vocabulary_error(int(beyond[0]), place, f"of token ids below {backend.config.vocab_size}")


def _check_delimiter_id(delimiter: int | None, vocab_size: int) -> None:
    if delimiter is None or 0 <= delimiter < vocab_size:
        return
    message = f"delimiter_token_id must be a token id from 0 to {vocab_size - 1}, got {delimiter}"
    raise InvalidValueError(message, code="invalid_delimiter_token_id", param="delimiter_token_id")


def _check_inspection(request: ScoreRequest) -> None:
    """Raises where the tokens of an item are asked for, and there are several."""
    if request.debug_top_k is not None and request.num_items != 1:
        message = f"debug_top_k shows what the model saw of one item: expected 1 item, got {request.num_items}"
        raise InvalidValueError(message, code="conflicting_parameters", param="debug_top_k")


def _scores(prepared: PreparedRequest, job: Job) -> NDArray[np.float64]:
    request, logits = prepared.request, job.label_logits[:, : prepared.labels.num_labels]
    if request.label_scoring == "single":
        return scores_from_logits(request.score_mode, logits, job.logsumexp)
    assert job.logsumexp is not None, "sequence labels are summed log-probabilities"
    logprobs = prepared.labels.logprobs(logits, job.logsumexp)
    return scores_from_logprobs(request.score_mode, logprobs)


def _check_finite(scores: NDArray[np.float64], items: Int64Array) -> None:
    """JSON has no word for what is not a number, and it would sort anywhere."""
    if not np.isfinite(scores).all():
        item = int(items[np.flatnonzero(~np.isfinite(scores).all(1))[0]])
        raise InternalError(f"items[{item}] got a score that is not a finite number: the model's arithmetic overflowed")
