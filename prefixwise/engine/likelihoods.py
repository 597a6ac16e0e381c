"""Log-likelihoods through the engine: sequences of tokens to the log-probabilities of their tokens.

TokenSequence -> LikelihoodPlan -> PreparedRequest after PreparedRequest -> engine -> TokenLogprobs
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import InternalError, InvalidValueError
from prefixwise.contract.inputs import Place, vocabulary_error
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, numbers
from prefixwise.contract.request import ScoreRequest
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.loras import LoadedLora
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.likelihoods import SHORT_BLOCK_SIZE, LikelihoodPlan, TokenSequence, plan_likelihoods
from prefixwise.plan.segments import Segments, plan_labels
from prefixwise.prompts.template import Prompt

_QUEUED_STEPS = 8  # of tokens that wait in the scheduler while more are planned
_ONE_LABEL = ((0,),)  # of a request; the plan has a token of its own for every row

OnProgress = Callable[[int, int], None]  # tokens read, and in all


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Of the tokens of a sequence that were read, natural logarithms."""

    logprobs: NDArray[np.float64]  # [n]
    is_greedy: NDArray[np.bool_]  # [n]: no token of the vocabulary is more likely
    top_ids: Int32Array  # [n, K]: the most likely tokens, best first
    top_logprobs: NDArray[np.float64]  # [n, K]

    @property
    def total(self) -> float:
        """The log-likelihood."""
        return float(self.logprobs.sum())

    @property
    def is_all_greedy(self) -> bool:
        return bool(self.is_greedy.all())


@dataclass(frozen=True, eq=False)
class PreparedLikelihoods:
    """Sequences as requests, one per prefix, that the scheduler runs in any order."""

    plan: LikelihoodPlan
    requests: tuple[PreparedRequest, ...]
    top_k: int


class _Outputs:
    """The rows of all requests. Those of a request are copied when it is done, so that its arrays are freed."""

    def __init__(self, prepared: PreparedLikelihoods) -> None:
        num_rows, top_k = prepared.plan.num_rows, prepared.top_k
        self._plan = prepared.plan
        self.logprobs = np.empty(num_rows, np.float64)
        self.is_greedy = np.empty(num_rows, np.bool_)
        self.top_ids = np.empty((num_rows, top_k), np.int32)
        self.top_logprobs = np.empty((num_rows, top_k), np.float64)

    def receive(self, first_row: int, state: RequestState) -> None:
        """Store the rows of a request that is done. Raises the error that ended it."""
        if state.error is not None:
            raise state.error
        assert state.logsumexp is not None, "the task asks for it"
        logits, top_logits = state.label_logits[:, 0].astype(np.float64), state.top_logits.astype(np.float64)
        norms = state.logsumexp.astype(np.float64)
        if not (np.isfinite(logits).all() and np.isfinite(norms).all()):
            raise InternalError("the model computed a logit that is not a finite number")
        rows = slice(first_row, first_row + len(logits))
        self.logprobs[rows] = logits - norms
        self.is_greedy[rows] = logits >= top_logits[:, 0]
        self.top_ids[rows] = state.top_ids
        self.top_logprobs[rows] = top_logits - norms[:, None]

    def result(self) -> list[TokenLogprobs]:
        """For each sequence."""
        return [
            TokenLogprobs(self.logprobs[rows], self.is_greedy[rows], self.top_ids[rows], self.top_logprobs[rows])
            for rows in self._plan.rows
        ]


class Likelihoods:
    """Reads log-probabilities with an engine."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._model = engine.backend.config

    def read(
        self, sequences: Sequence[TokenSequence], *, top_k: int = 1, on_progress: OnProgress | None = None
    ) -> list[TokenLogprobs]:
        """Read all sequences and wait. Raises RequestError, before any device work, if one cannot be read."""
        prepared = self.prepare(sequences, top_k=top_k)
        outputs, first_rows = _Outputs(prepared), _first_rows(prepared)
        changes: SimpleQueue[int] = SimpleQueue()
        waiting, live, num_queued = deque(range(len(prepared.requests))), dict[int, RequestState](), 0
        max_queued, num_rows, num_read = (
            _QUEUED_STEPS * self._engine.backend.info.step_tokens,
            prepared.plan.num_rows,
            0,
        )
        try:
            while waiting or live:
                new: dict[int, RequestState] = {}
                while waiting and (not (live or new) or num_queued < max_queued):
                    number = waiting.popleft()
                    request = prepared.requests[number]
                    new[number] = self._engine.state_of(request, on_change=partial(changes.put, number))
                    num_queued += request.num_tokens
                live.update(new)
                self._engine.submit_all(tuple(new.values()))  # together, as they would else run in steps of one or two
                number = changes.get()
                state = live.get(number)
                if state is None or not state.is_done:
                    continue
                outputs.receive(first_rows[number], live.pop(number))
                num_queued -= prepared.requests[number].num_tokens
                num_read += len(prepared.plan.groups[number].score_offsets)
                if on_progress is not None:
                    on_progress(num_read, num_rows)
        except BaseException:
            for state in live.values():
                state.cancel()
            raise
        return outputs.result()

    def prepare(
        self, sequences: Sequence[TokenSequence], *, top_k: int = 1, model: str | None = None
    ) -> PreparedLikelihoods:
        """Raises RequestError if a sequence cannot be read. `model`: the name of a LoRA adapter, or any other."""
        begin = perf_counter()
        self._check_model()
        for number, sequence in enumerate(sequences):
            self._check(sequence, number)
        info = self._engine.backend.info
        rest_size = SHORT_BLOCK_SIZE if info.reads_short_blocks else KV_BLOCK_SIZE
        plan = plan_likelihoods(sequences, rest_size=rest_size, num_kv_blocks=info.num_kv_blocks)
        top_k = min(top_k, self._model.vocab_size)
        lora = self._engine.lora_of(model)
        requests = tuple(self._prepare_group(segments, top_k, begin, lora) for segments in plan.groups)
        return PreparedLikelihoods(plan, requests, top_k)

    def prepare_prompts(
        self, prompts: Ragged, *, reads_tokens: bool, reads_next: bool, top_k: int, model: str | None = None
    ) -> PreparedLikelihoods:
        """Whole prompts: all of their tokens but the first, or what comes after them, or both. Raises RequestError."""
        sequences = [TokenSequence(ids, 1 if reads_tokens else len(ids), reads_next) for ids in prompts]
        return self.prepare(sequences, top_k=top_k, model=model)

    def finish(self, prepared: PreparedLikelihoods, states: Sequence[RequestState]) -> list[TokenLogprobs]:
        """The result for each sequence. `states`: of the requests, done. Raises the error that ended one of them."""
        outputs = _Outputs(prepared)
        for first_row, state in zip(_first_rows(prepared), states, strict=True):
            outputs.receive(first_row, state)
        return outputs.result()

    def _check_model(self) -> None:
        if self._model.num_classes:
            message = "this model is a classifier: it has logits of classes and none of tokens, so no log-likelihoods"
            raise InvalidValueError(message, code="no_vocabulary")

    def _check(self, sequence: TokenSequence, number: int) -> None:
        longest, vocab_size = self._model.max_context_len, self._model.vocab_size
        if sequence.num_computed > longest:
            message = (
                f"prompt[{number}] must have at most {longest} tokens that the model sees, got {sequence.num_computed}"
            )
            raise InvalidValueError(message, code="context_too_long", param="prompt", item_index=number)
        unknown = sequence.token_ids[(sequence.token_ids >= vocab_size) | (sequence.token_ids < 0)]
        if len(unknown):
            place = Place(f"prompt[{number}]", "prompt", number)
            raise vocabulary_error(int(unknown[0]), place, f"of token ids below {vocab_size}")

    def _prepare_group(self, segments: Segments, top_k: int, begin: float, lora: LoadedLora | None) -> PreparedRequest:
        num_tokens = len(segments.prefix_ids) + len(segments.tokens.flat)
        request = ScoreRequest(
            query=segments.prefix_ids, items=segments.tokens, label_token_ids=_ONE_LABEL, score_mode="logprob"
        )
        prompt = Prompt(segments.prefix_ids, segments.tokens, False, _ONE_LABEL, num_tokens)
        plan = self._engine.planner.plan(segments, "prefill_extend")
        return PreparedRequest(
            request,
            prompt,
            plan_labels(_ONE_LABEL),
            {},
            numbers(len(segments.tokens)),
            plan,
            begin,
            perf_counter() - begin,
            self._model.model_size,
            top_k,
            lora,
        )


def _first_rows(prepared: PreparedLikelihoods) -> list[int]:
    """Where the rows of each request begin."""
    sizes: Int64Array = np.array([len(group.score_offsets) for group in prepared.plan.groups], np.int64)
    first_rows: list[int] = (np.cumsum(sizes) - sizes).tolist()
    return first_rows
