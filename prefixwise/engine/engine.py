"""`ScoringEngine`: a request's path through the engine. `Scorer` and the server are built on it.

prepare   on the caller's thread: check, tokenize, plan (`prepare.py`)
submit    to the scheduler, which calls back (`scheduler.py`)
finish    on the caller's thread: logits to scores (`results.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.ragged import Int32Array
from prefixwise.contract.request import Algorithm, ScoreRequest
from prefixwise.contract.result import ScoreResult
from prefixwise.contract.scores import needs_logsumexp
from prefixwise.engine.loras import LoadedLora, LoraTable, check_lora_name
from prefixwise.engine.prefix_cache import PinnedPrefix
from prefixwise.engine.prepare import EngineConfig, PreparedRequest, Preparer
from prefixwise.engine.request_state import OnChange, RequestState, ScoringTask
from prefixwise.engine.results import score_result
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import Backend
from prefixwise.plan.algorithms import Planner
from prefixwise.prompts.template import Prompt
from prefixwise.prompts.tokenizer import TextTokenizer

OnProgress = Callable[[int, int], None]  # items done, items in all

_NO_IDS = np.zeros(0, np.int32)


class ScoringEngine:
    """A model that is ready to score. Any number of threads may use it."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, tokenizer: TextTokenizer | None) -> None:
        backend, prefix_cache = scheduler.backend, scheduler.options.prefix_cache
        self.config = config
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._preparer = Preparer(
            *(config, backend.config, backend.info, tokenizer),
            prefix_cache=prefix_cache,
            costs=scheduler.costs,
            loras=scheduler.loras,
        )

    @property
    def backend(self) -> Backend:
        return self.scheduler.backend

    @property
    def planner(self) -> Planner:
        return self._preparer.planner

    def score(self, request: ScoreRequest, on_progress: OnProgress | None = None) -> ScoreResult:
        """Score one request and wait for it. Raises RequestError, before any device work, if it cannot be scored."""
        prepared = self.prepare(request)
        return self.finish(prepared, self.run(prepared, on_progress))

    def run(self, prepared: PreparedRequest, on_progress: OnProgress | None = None) -> RequestState:
        """Submit the request and wait until it is done."""
        changes: SimpleQueue[None] = SimpleQueue()
        state = self.submit(prepared, on_change=lambda: changes.put(None))
        try:
            while not state.is_done:
                changes.get()
                if on_progress is not None and prepared.plan is not None and state.num_items_done:
                    on_progress(state.num_items_done, len(prepared.good))
        except BaseException:
            state.cancel()
            raise
        return state

    # The three stages

    def prepare(self, request: ScoreRequest) -> PreparedRequest:
        """Raises RequestError if the request cannot be scored, TokenizerError for text without a tokenizer."""
        return self._preparer.prepare(request)

    def prepare_prompt(self, request: ScoreRequest, prompt: Prompt, begin: float) -> PreparedRequest:
        """Prepare a request whose prompt exists. `begin`: time.perf_counter() before the prompt was built."""
        return self._preparer.prepare_prompt(request, prompt, begin)

    def submit(
        self,
        prepared: PreparedRequest,
        *,
        deadline: float | None = None,
        on_change: OnChange | None = None,
        priority: int = 0,
    ) -> RequestState:
        """Queue the request. Raises QueueFullError. The arguments are those of `state_of`."""
        state = self.state_of(prepared, deadline=deadline, on_change=on_change, priority=priority)
        self.submit_all([state])
        return state

    def state_of(
        self,
        prepared: PreparedRequest,
        *,
        deadline: float | None = None,
        on_change: OnChange | None = None,
        priority: int = 0,
    ) -> RequestState:
        """The state of a request that is not queued yet.

        `deadline` is a value of time.monotonic(). The scheduler's thread calls `on_change` when items are scored and
        when the request is done. Requests of a lower `priority` value run first.
        """
        plan, request = prepared.plan, prepared.request
        task = ScoringTask(
            plan.segments.prefix_ids if plan is not None and plan.needs_prefill else _NO_IDS,
            plan,
            need_logsumexp=needs_logsumexp(request.score_mode, request.label_scoring),
            need_hidden=request.return_pooled_hidden_states,
            top_k=prepared.top_k,
            is_timed=request.return_debug,
            deadline=deadline,
            priority=priority,
            vectors=None if plan is None else plan.segments.vectors,
            lora_id=0 if prepared.lora is None else prepared.lora.id,
        )
        return RequestState(task, on_change)

    def submit_all(self, states: Sequence[RequestState]) -> None:
        """Queue all of them together, or none. Raises QueueFullError."""
        planned = [state for state in states if state.task.plan is not None]
        if planned:
            self.scheduler.submit(*planned)
        for state in states:
            if state.task.plan is None:  # no item of it can be scored
                state.finish()

    def finish(self, prepared: PreparedRequest, state: RequestState, *, as_rows: bool = False) -> ScoreResult:
        """The scores of a request that is done, as lists or as `rows`. Raises the error that ended it."""
        name = self.config.model_name if prepared.lora is None else prepared.lora.name
        return score_result(prepared, state, name, self.tokenizer, as_rows=as_rows)

    def tiny_request(self, algorithm: Algorithm = "auto", *, item_tokens: int = 1) -> ScoreRequest:
        """The smallest request that the model can score, or one of about `item_tokens`: for warm-up, health checks."""
        token = 1 if self.config.delimiter_token_id == 0 else 0
        item = [token] * min(item_tokens, max(1, self.backend.config.max_context_len // 2))
        items = [item] * min(-(-item_tokens // len(item)), self.config.max_items_per_request)
        labels = {} if self.backend.config.num_classes else {"label_token_ids": [0]}
        body = {"query": [token], "items": items, **labels, "score_mode": "prob", "algorithm": algorithm}
        return parse_score_request(body)

    # LoRA adapters

    @property
    def loras(self) -> LoraTable:
        return self.scheduler.loras

    def lora_of(self, model: str | None) -> LoadedLora | None:
        """The adapter of this name; None: it is not one."""
        return self._preparer.lora_of(model)

    def load_lora(self, name: str, path: str, *, in_place: bool = False) -> LoadedLora:
        """Load a folder of peft under a name, which requests use as their model's. Raises InvalidValueError."""
        check_lora_name(name, (self.config.model_name, *self.config.served_names))
        return self.loras.load(name, path, in_place=in_place)

    # Pinned prefixes

    def prepare_prefix(self, query: str | Int32Array) -> Int32Array:
        """The tokens that requests with this query share. Raises RequestError if no request could have them."""
        return self._preparer.prepare_prefix(query)

    def check_prefix(self, prefix_ids: Int32Array) -> Int32Array:
        """Return the tokens unchanged. Raises RequestError if the KV cache cannot hold them."""
        return self._preparer.check_prefix(prefix_ids)

    def submit_prefix(
        self,
        prefix_ids: Int32Array,
        *,
        ttl_seconds: float,
        deadline: float | None = None,
        on_change: OnChange | None = None,
        lora: LoadedLora | None = None,
    ) -> RequestState:
        """Compute the prefix and pin it in the KV cache for `ttl_seconds`. Raises QueueFullError."""
        lora_id = 0 if lora is None else lora.id
        task = ScoringTask(prefix_ids, None, deadline=deadline, pin_seconds=ttl_seconds, lora_id=lora_id)
        state = RequestState(task, on_change)
        self.scheduler.submit(state)
        return state

    def finish_prefix(self, state: RequestState) -> PinnedPrefix:
        """The pinned prefix of a request that is done. Raises the error that ended it."""
        if state.error is not None:
            raise state.error
        assert state.pinned is not None, "a prefix request that is done has pinned its prefix"
        return state.pinned

    def release_prefix(self, prefix_id: str) -> bool:
        """Unpin a prefix. False if no pinned prefix has this id."""
        return self.scheduler.release_pin(prefix_id)

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        return self.scheduler.pins.listed()

    def close(self) -> None:
        """Finish what the device has started, then free its memory. A second call does nothing."""
        self.scheduler.close()
