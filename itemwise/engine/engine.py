"""`ScoringEngine`: a request's whole walk, from contract to result. `Scorer` and the server stand on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from itemwise.backends.base import Backend
from itemwise.contract.errors import BackendError, InvalidValueError, RequestError
from itemwise.contract.ragged import Int64Array
from itemwise.contract.request import ScoreRequest, check_item_count, check_model, check_vocabulary
from itemwise.contract.result import ItemError, ScoreResult, Usage
from itemwise.contract.score_modes import needs_normalizer, scores_from_logits, scores_from_logprobs
from itemwise.engine.executor import Executor, OnProgress, PlanOutput
from itemwise.plan.algorithms import Planner, ScorePlan
from itemwise.plan.label_rows import LabelRows, lay_out_segments, plan_labels
from itemwise.plan.options import PlanOptions
from itemwise.plan.shared_prefix import split_items
from itemwise.prompts.limits import check_limits
from itemwise.prompts.template import Prompt, build_prompt
from itemwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("itemwise")


@dataclass(frozen=True)
class EngineConfig:
    """What holds for every request."""

    model_name: str
    delimiter_token_id: int | None = None
    max_items_per_request: int = 100_000
    plan: PlanOptions = field(default_factory=PlanOptions)


class ScoringEngine:
    """A model that is ready to score. Calls from several threads take turns."""

    def __init__(self, config: EngineConfig, backend: Backend, tokenizer: TextTokenizer | None) -> None:
        _check_delimiter_id(config.delimiter_token_id, backend.config.vocab_size)
        self.config = config
        self.backend = backend
        self.tokenizer = tokenizer
        self.planner = Planner(backend.config, backend.info, config.plan.resolve(backend.info))
        self._executor = Executor(backend)
        self._device_lock = threading.RLock()  # a progress callback may score too
        self._is_closed = False

    def score(self, request: ScoreRequest, on_progress: OnProgress | None = None) -> ScoreResult:
        """Score one request. Raises RequestError before any work where it cannot be scored."""
        begin = perf_counter()
        request = self._check(request)
        prompt = build_prompt(request, self.tokenizer, self.config.delimiter_token_id)
        tokenized = perf_counter()
        labels = plan_labels(prompt.label_ids)
        item_errors = self._item_errors(request, prompt, labels)
        good = np.array([i for i in range(request.num_items) if i not in item_errors], np.int64)
        if not len(good):
            return self._result(request, prompt, item_errors, good, np.zeros((0, 1)), None)
        plan = self._plan(request, prompt, labels, good)
        planned = perf_counter()
        normalize = needs_normalizer(request.score_mode, request.label_scoring)
        with self.exclusive_device():
            started = perf_counter()
            output = self._executor.run(plan, normalize=normalize, timed=request.return_debug, on_progress=on_progress)
        scores = _scores(request, labels, output)
        debug = None
        if request.return_debug:
            spans = {"tokenize": tokenized - begin, "queue": started - planned}
            debug = _debug(plan, output, spans, perf_counter() - begin)
        return self._result(request, prompt, item_errors, good, scores, debug)

    @contextmanager
    def exclusive_device(self) -> Iterator[None]:
        """The device for one caller at a time. Raises BackendError where the engine is closed."""
        with self._device_lock:
            if self._is_closed:
                raise BackendError("this scorer is closed, so its model is gone; make another one")
            yield

    def close(self) -> None:
        """Give the device's memory back, after the request that is running; a second call does nothing."""
        with self._device_lock:
            if not self._is_closed:
                self._is_closed = True
                self.backend.close()

    def _check(self, request: ScoreRequest) -> ScoreRequest:
        check_model(request, (self.config.model_name,))
        check_item_count(request, self.config.max_items_per_request)
        return check_vocabulary(request, self.backend.config.vocab_size)

    def _item_errors(self, request: ScoreRequest, prompt: Prompt, labels: LabelRows) -> dict[int, RequestError]:
        """The errors of all items that cannot be scored; raises the first unless they are to be reported."""
        report = request.on_item_error == "report"
        beyond = check_limits(prompt, self.backend.config, label_tokens=labels.longest_stem, report=report)
        return {**prompt.item_errors, **beyond}

    def _plan(self, request: ScoreRequest, prompt: Prompt, labels: LabelRows, good: Int64Array) -> ScorePlan:
        split = split_items(prompt.take(good))
        plan = self.planner.plan(lay_out_segments(split, labels), request.algorithm)
        log.log(logging.INFO if plan.is_fallback else logging.DEBUG, "%s: %s", plan.algorithm, plan.reason)
        if plan.mask_note:
            log.info("%s with mask %s: %s", plan.algorithm, plan.mask, plan.mask_note)
        return plan

    def _result(
        self,
        request: ScoreRequest,
        prompt: Prompt,
        item_errors: dict[int, RequestError],
        good: Int64Array,
        scores: NDArray[np.float64],
        debug: dict[str, object] | None,
    ) -> ScoreResult:
        rows: list[list[float] | None] = [None] * request.num_items
        for index, row in zip(good.tolist(), scores.tolist(), strict=True):
            rows[index] = row
        names = request.labels or tuple(" ".join(map(str, ids)) for ids in prompt.label_ids)
        return ScoreResult(
            scores=rows,
            items=request.items,
            labels=names,
            score_mode=request.score_mode,
            model=self.config.model_name,
            usage=Usage(prompt.prompt_tokens),
            truncated=prompt.truncated,
            item_errors=tuple(ItemError.from_error(i, item_errors[i]) for i in sorted(item_errors)),
            debug=debug,
        )


def _check_delimiter_id(delimiter: int | None, vocab_size: int) -> None:
    if delimiter is None or 0 <= delimiter < vocab_size:
        return
    message = f"delimiter_token_id must be a token id from 0 to {vocab_size - 1}, got {delimiter}"
    raise InvalidValueError(message, code="invalid_delimiter_token_id", param="delimiter_token_id")


def _scores(request: ScoreRequest, labels: LabelRows, output: PlanOutput) -> NDArray[np.float64]:
    if request.label_scoring == "single":
        return scores_from_logits(request.score_mode, output.label_logits, output.log_normalizers)
    assert output.log_normalizers is not None, "sequence labels are summed log-probabilities"
    logprobs = labels.logprobs(output.label_logits, output.log_normalizers)
    return scores_from_logprobs(request.score_mode, logprobs)


def _debug(plan: ScorePlan, output: PlanOutput, spans: dict[str, float], total: float) -> dict[str, object]:
    """What `return_debug` shows; times in milliseconds, which add up to the request's."""
    spans = {**spans, "prefill": output.prefill_seconds, "extend": output.extend_seconds}
    spans["host"] = total - sum(spans.values())
    batches = [
        {
            **asdict(batch),
            "segments": batch.stop - batch.first,
            "fill": round(batch.num_tokens / batch.bucket, 4),
        }
        for batch in plan.batches
    ]
    return {
        "algorithm": plan.algorithm,
        "reason": plan.reason,
        "mask": plan.mask,
        "chunks": sum(len(batch.row_starts) - 1 for batch in plan.batches),
        "batches": batches,
        "cached_tokens": 0,
        "milliseconds": {name: round(1000 * seconds, 3) for name, seconds in spans.items()},
    }
