"""Preparation: from a legal request to tokens and a plan. Host work on the caller's thread; no device, no scheduler.

check      the model's name, the number of items and scores, the vocabulary
prompt     which tokens each item sees (`prompts/template.py`)
limits     which items are too long for the model
plan       which algorithm, in which sequences (`plan/algorithms.py`)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from prefixwise.contract.checks import (
    check_embed_overrides,
    check_item_count,
    check_model,
    check_model_name,
    check_score_count,
    check_vocabulary,
    with_classes,
)
from prefixwise.contract.errors import InvalidValueError, RequestError
from prefixwise.contract.inputs import Place, vocabulary_error
from prefixwise.contract.ragged import Int32Array, Int64Array, numbers
from prefixwise.contract.request import ScoreRequest
from prefixwise.engine.loras import LoadedLora, LoraTable
from prefixwise.forward.backend import BackendInfo
from prefixwise.models.config import ModelConfig
from prefixwise.plan.algorithms import Planner, PlanOptions, ScorePlan
from prefixwise.plan.cost_model import MeasuredCosts
from prefixwise.plan.segments import LabelRows, lay_out_segments, plan_labels, split_items, with_vocabulary
from prefixwise.prompts.profile_choice import ProfileChoice, profile_of_any_model
from prefixwise.prompts.template import Prompt, build_prefix, build_prompt, check_limits, space_warnings
from prefixwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("prefixwise")

MAX_SCORES_PER_REQUEST = 10_000_000  # items x labels: about 200 MB of JSON


@dataclass(frozen=True)
class EngineConfig:
    """The settings that all requests share."""

    model_name: str
    delimiter_token_id: int | None = None
    max_items_per_request: int = 100_000
    plan: PlanOptions = field(default_factory=PlanOptions)
    served_names: tuple[str, ...] = ()  # other names that a request may call the model by
    profiles: ProfileChoice = field(default_factory=profile_of_any_model)  # how documents become prompts
    revision: str | None = None  # the commit of a model from the hub
    checkpoint_quantization: str | None = None  # how the checkpoint stores its weights, where they are quantised


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request, its prompt and its plan: everything the host computes before the device starts."""

    request: ScoreRequest
    prompt: Prompt
    labels: LabelRows
    item_errors: dict[int, RequestError]
    good: Int64Array  # indices of the items that can be scored
    plan: ScorePlan | None  # None: no item can be scored
    begin: float  # time.perf_counter() when preparation began
    tokenize_seconds: float

    model_size: int = 0  # numbers of a hidden state
    top_k: int = 0  # so many of the most likely tokens are read after each scored token
    lora: LoadedLora | None = None  # the adapter that computes it; None: the model itself

    @property
    def num_items(self) -> int:
        return self.request.num_items

    @property
    def num_tokens(self) -> int:
        """How many token ids the request holds."""
        return len(self.prompt.prefix_ids) + len(self.prompt.sequences.flat)

    @property
    def num_values(self) -> int:
        """How many numbers the result has."""
        hidden = self.model_size if self.request.return_pooled_hidden_states else 0
        return self.num_items * (self.request.num_labels + hidden)


class Preparer:
    """Prepares requests and prefixes for one model. It holds no state of a request, so any thread may call it."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        backend: BackendInfo,
        tokenizer: TextTokenizer | None,
        *,
        prefix_cache: bool,
        costs: MeasuredCosts | None = None,  # None: static figures
        loras: LoraTable | None = None,  # None: there are none
    ) -> None:
        _check_delimiter_id(config.delimiter_token_id, model.vocab_size)
        self._config = config
        self._model = model
        self._backend = backend
        self._tokenizer = tokenizer
        self._prefix_cache = prefix_cache and model.is_causal
        self._loras = loras
        self.planner = Planner(model, backend, config.plan.resolve(backend), prefix_cache, costs)

    def prepare(self, request: ScoreRequest) -> PreparedRequest:
        """Raises RequestError if the request cannot be scored, TokenizerError for text without a tokenizer."""
        begin = perf_counter()
        check_model(request, self._names())
        check_item_count(request.num_items, self._config.max_items_per_request)
        request = with_classes(request, self._model.class_labels)
        check_score_count(request, MAX_SCORES_PER_REQUEST, self._model.model_size)
        request = check_vocabulary(request, self._model.vocab_size)
        request = check_embed_overrides(request, self._model.vocab_size, self._model.model_size, self._backend.dtype)
        prompt = build_prompt(request, self._tokenizer, self._config.delimiter_token_id)
        warnings = space_warnings(request, self._tokenizer)
        if warnings:
            request = replace(request, warnings=(*request.warnings, *warnings))
        return self.prepare_prompt(request, prompt, begin)

    def prepare_prompt(self, request: ScoreRequest, prompt: Prompt, begin: float) -> PreparedRequest:
        """Prepare a request whose prompt exists. `begin`: time.perf_counter() before the prompt was built."""
        tokenize_seconds = perf_counter() - begin
        _check_inspection(request)
        labels = plan_labels(prompt.label_ids)
        item_errors = self._item_errors(request, prompt, labels)
        good = numbers(request.num_items)
        if item_errors:
            good = np.array([i for i in range(request.num_items) if i not in item_errors], np.int64)
        plan = self._plan(request, prompt, labels, good) if len(good) else None
        return PreparedRequest(
            *(request, prompt, labels, item_errors, good, plan, begin, tokenize_seconds, self._model.model_size),
            lora=self.lora_of(request.model),
        )

    def lora_of(self, model: str | None) -> LoadedLora | None:
        """The adapter of this name; None: the request is for the model itself.

        Raises ModelNotFoundError for a name of neither, which may be that of an adapter that was just unloaded. An
        engine without room for adapters takes any name: callers have checked it, or know none.
        """
        lora = None if self._loras is None else self._loras.find(model)
        if lora is None and self._backend.max_loras:
            check_model_name(model, self._names())
        return lora

    def _names(self) -> tuple[str, ...]:
        """All names that a request may have for its model."""
        adapters = () if self._loras is None else self._loras.names
        return (self._config.model_name, *self._config.served_names, *adapters)

    def prepare_prefix(self, query: str | Int32Array) -> Int32Array:
        """The tokens that requests with this query share. Raises RequestError if no request could have them."""
        return self.check_prefix(build_prefix(query, self._tokenizer, self._config.delimiter_token_id))

    def check_prefix(self, prefix_ids: Int32Array) -> Int32Array:
        """Return the tokens unchanged. Raises RequestError if the KV cache cannot hold them."""
        if not self._prefix_cache:
            why = "the prefix cache is off" if self._model.is_causal else "with bidirectional attention none is shared"
            message = f"this server does not cache prefixes between requests ({why})"
            raise InvalidValueError(message, code="prefix_cache_disabled")
        longest = min(self._model.max_context_len, self._backend.max_prefix_len)
        if len(prefix_ids) > longest:
            message = f"query must have at most {longest} tokens, got {len(prefix_ids)}"
            raise InvalidValueError(message, code="context_too_long", param="query")
        unknown = prefix_ids[prefix_ids >= self._model.vocab_size]
        if len(unknown):
            place = Place("query", "query")
            raise vocabulary_error(int(unknown[0]), place, f"of token ids below {self._model.vocab_size}")
        return prefix_ids

    def _item_errors(self, request: ScoreRequest, prompt: Prompt, labels: LabelRows) -> dict[int, RequestError]:
        """The errors of all items that cannot be scored. Raises the first one unless the request wants a report."""
        report = request.on_item_error == "report"
        too_long = check_limits(prompt, self._model, label_tokens=labels.longest_stem, report=report)
        return {**prompt.item_errors, **too_long}

    def _plan(self, request: ScoreRequest, prompt: Prompt, labels: LabelRows, good: Int64Array) -> ScorePlan:
        split = split_items(prompt.take(good))
        if request.debug_top_k is not None:
            labels = with_vocabulary(labels, 0 if self._model.num_classes else self._model.vocab_size)
        segments = lay_out_segments(split, labels)
        if prompt.overrides is not None:
            segments = replace(segments, vectors=prompt.overrides.vectors)
        plan = self.planner.plan(segments, request.algorithm)
        log.log(logging.INFO if plan.is_fallback else logging.DEBUG, "%s: %s", plan.algorithm, plan.reason)
        if plan.mask_note:
            log.info("%s with mask %s: %s", plan.algorithm, plan.mask, plan.mask_note)
        return plan


def _check_delimiter_id(delimiter: int | None, vocab_size: int) -> None:
    if delimiter is None or 0 <= delimiter < vocab_size:
        return
    message = f"delimiter_token_id must be a token id from 0 to {vocab_size - 1}, got {delimiter}"
    raise InvalidValueError(message, code="invalid_delimiter_token_id", param="delimiter_token_id")


def _check_inspection(request: ScoreRequest) -> None:
    """Raises if the request has several items and `debug_top_k`, which inspects a single one."""
    if request.debug_top_k is not None and request.num_items != 1:
        message = f"debug_top_k shows what the model saw of one item: expected 1 item, got {request.num_items}"
        raise InvalidValueError(message, code="conflicting_parameters", param="debug_top_k")
