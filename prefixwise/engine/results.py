"""Results: from the label logits of a finished request to its scores and its debug block. Host work, no device.

logits -> scores (`contract/scores.py`) -> ScoreResult, with `return_debug` also how the request ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import InternalError
from prefixwise.contract.ragged import IdLists, Int32Array, Int64Array
from prefixwise.contract.result import ItemError, ScoreResult, Usage
from prefixwise.contract.scores import ScoreRows, scores_from_logits, scores_from_logprobs
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.plan.algorithms import ScorePlan
from prefixwise.prompts.template import Prompt
from prefixwise.prompts.tokenizer import TextTokenizer

MAX_SEGMENTS_SHOWN = 256  # in the debug block's layout, which is drawn as a picture


def score_result(
    prepared: PreparedRequest,
    state: RequestState,
    model_name: str,
    tokenizer: TextTokenizer | None,
    *,
    as_rows: bool = False,
) -> ScoreResult:
    """The scores of a request that is done, as lists or as `rows`. Raises the error that ended it."""
    if state.error is not None:
        raise state.error
    request, prompt, item_errors = prepared.request, prepared.prompt, prepared.item_errors
    scores: NDArray[np.float64] = np.zeros((0, 1))
    debug = None
    if prepared.plan is not None:
        scores = _scores(prepared, state)
        _check_finite(scores, prepared.good)
        if request.return_debug:
            debug = _debug_block(prepared, prepared.plan, state, tokenizer)
    rows = ScoreRows(scores, prepared.good, prepared.num_items)
    return ScoreResult(
        scores=[] if as_rows else rows[:],
        rows=rows if as_rows else None,
        items=request.items if isinstance(request.items, tuple) else IdLists(request.items),
        labels=request.labels or tuple(" ".join(map(str, ids)) for ids in prompt.label_ids),
        score_mode=request.score_mode,
        model=model_name,
        usage=Usage(prompt.prompt_tokens, state.cached_tokens),
        truncated=prompt.truncated,
        item_errors=tuple(ItemError.from_error(i, item_errors[i]) for i in sorted(item_errors)),
        pooled_hidden_states=_pooled_hidden_states(prepared, state) if request.return_pooled_hidden_states else None,
        are_classes=request.labels is not None and request.label_token_ids is not None,
        warnings=request.warnings,
        debug=debug,
    )


def _pooled_hidden_states(prepared: PreparedRequest, state: RequestState) -> list[NDArray[np.float32] | None]:
    """One per item of the request: that after its last token, which is the first row of a label of many tokens."""
    of_all: list[NDArray[np.float32] | None] = [None] * prepared.num_items
    if state.hidden is not None:
        _check_finite(state.hidden, prepared.good.repeat(prepared.labels.rows_per_item))
        for index, hidden in zip(prepared.good.tolist(), state.hidden[:: prepared.labels.rows_per_item], strict=True):
            of_all[index] = hidden
    return of_all


def _scores(prepared: PreparedRequest, state: RequestState) -> NDArray[np.float64]:
    request, logits = prepared.request, state.label_logits[:, : prepared.labels.num_labels]
    if request.label_scoring == "single":
        return scores_from_logits(request.score_mode, logits, state.logsumexp)
    assert state.logsumexp is not None, "labels of many tokens are scored by summed log-probabilities"
    logprobs = prepared.labels.logprobs(logits, state.logsumexp)
    return scores_from_logprobs(request.score_mode, logprobs)


def _check_finite(scores: NDArray[np.floating], items: Int64Array) -> None:
    """Raises for NaN and infinity: JSON cannot hold them, and they have no place in an order."""
    if not np.isfinite(scores).all():
        item = int(items[np.flatnonzero(~np.isfinite(scores).all(1))[0]])
        raise InternalError(f"items[{item}] got a score that is not a finite number: the model's arithmetic overflowed")


# The debug block


def _debug_block(
    prepared: PreparedRequest, plan: ScorePlan, state: RequestState, tokenizer: TextTokenizer | None
) -> dict[str, object]:
    """How the request ran. Times are in milliseconds and add up to the request's."""
    spans = {
        "tokenize": prepared.tokenize_seconds,
        "queue": state.queue_seconds,
        "prefill": state.prefill_seconds,
        "extend": state.extend_seconds,
    }
    spans["host"] = perf_counter() - prepared.begin - sum(spans.values())
    block: dict[str, object] = {
        "algorithm": plan.algorithm,
        "reason": plan.reason,
        "mask": plan.mask,
        "chunks": len(plan.sequences) + len(plan.long_items) if plan.sequences else len(state.batches),
        "batches": [{**batch._asdict(), "fill": batch.fill} for batch in state.batches],
        "cached_tokens": state.cached_tokens,
        "milliseconds": {name: round(1000 * seconds, 3) for name, seconds in spans.items()},
        "layout": _layout(plan),
    }
    top_k = prepared.request.debug_top_k
    if top_k is not None:
        vocabulary_logits = state.label_logits[0, prepared.labels.num_labels :]
        block["item"] = _inspected_item(plan, prepared.prompt, vocabulary_logits, top_k, tokenizer)
    return block


def _layout(plan: ScorePlan) -> dict[str, object]:
    """The attention layout: each segment attends to `prefix_lens` tokens of the prefix and, causally, to its own.

    `rows` are the sequences of serial and packed: runs of segments behind a copy of the prefix. A long item is a row of
    its own.
    """
    segments = plan.segments
    return {
        "prefix_tokens": len(segments.prefix_ids),
        "segments": len(segments.tokens),
        "segments_per_item": segments.segments_per_item,
        "prefix_lens": segments.prefix_lens[:MAX_SEGMENTS_SHOWN].tolist(),
        "tail_lens": segments.tokens.lens[:MAX_SEGMENTS_SHOWN].tolist(),
        "rows": [[first, stop] for first, stop in _rows(plan) if first < MAX_SEGMENTS_SHOWN],
    }


def _rows(plan: ScorePlan) -> Iterable[tuple[int, int]]:
    if not plan.sequences:
        return ()
    per_item, num_segments = plan.segments.segments_per_item, len(plan.segments.tokens)
    starts = {int(plan.whole_indices[each.first]) for each in plan.sequences}
    starts.update(per_item * (item + after) for item in plan.long_items for after in (0, 1))
    return pairwise(sorted(starts | {num_segments}))


def _inspected_item(
    plan: ScorePlan,
    prompt: Prompt,
    vocabulary_logits: NDArray[np.float32],  # [V] at the scored position
    top_k: int,
    tokenizer: TextTokenizer | None,
) -> Mapping[str, object]:
    """The tokens that the model saw of the request's only item, and the tokens that it expects next."""
    context = prompt.context(0)
    return {
        "tokens": [_described(token, tokenizer) for token in context.tolist()],
        "prefix_tokens": int(plan.segments.prefix_lens[0]),
        "scored_position": len(context) - 1,
        "top": _most_likely(vocabulary_logits, top_k, tokenizer),
    }


def _most_likely(logits: NDArray[np.float32], top_k: int, tokenizer: TextTokenizer | None) -> list[dict[str, object]]:
    """Best first, ties by id. Probabilities are over the whole vocabulary."""
    wide = logits.astype(np.float64)
    largest = wide.max(initial=-np.inf)
    logsumexp = largest + np.log(np.exp(wide - largest).sum()) if len(wide) else 0.0
    best: Int32Array = np.argsort(-wide, kind="stable")[:top_k].astype(np.int32)
    return [
        {**_described(token, tokenizer), "logprob": logprob, "prob": float(np.exp(logprob))}
        for token, logprob in zip(best.tolist(), (wide[best] - logsumexp).tolist(), strict=True)
    ]


def _described(token: int, tokenizer: TextTokenizer | None) -> dict[str, object]:
    """A token's id and, with a tokenizer, its text."""
    return {"id": token, "text": None if tokenizer is None else tokenizer.decode_token(token)}
