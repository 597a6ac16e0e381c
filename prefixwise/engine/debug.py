"""What `return_debug` shows: how a request ran, what its plan looks like, and what the model saw of one item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.ragged import Int32Array
from prefixwise.engine.job import Job
from prefixwise.plan.algorithms import ScorePlan
from prefixwise.prompts.template import Prompt
from prefixwise.prompts.tokenizer import TextTokenizer

MAX_SEGMENTS_SHOWN = 256  # of the layout, which is for a picture


def debug_block(plan: ScorePlan, job: Job, *, begin: float, tokenize_seconds: float) -> dict[str, object]:
    """How it ran; times in milliseconds, which add up to the request's. `begin`: of time.perf_counter()."""
    spans = {
        "tokenize": tokenize_seconds,
        "queue": job.queue_seconds,
        "prefill": job.prefill_seconds,
        "extend": job.extend_seconds,
    }
    spans["host"] = perf_counter() - begin - sum(spans.values())
    return {
        "algorithm": plan.algorithm,
        "reason": plan.reason,
        "mask": plan.mask,
        "chunks": len(plan.rows) or len(job.batches),
        "batches": [{**asdict(batch), "fill": batch.fill} for batch in job.batches],
        "cached_tokens": job.cached_tokens,
        "milliseconds": {name: round(1000 * seconds, 3) for name, seconds in spans.items()},
        "layout": _layout(plan),
    }


def _layout(plan: ScorePlan) -> dict[str, object]:
    """Who sees whom: each segment reads `prefix_lens` tokens of the prefix and its own `tail_lens`, causally.

    `rows` are the runs of segments that stand behind a prefix of their own; none where the prefix is computed apart.
    """
    segments = plan.segments
    rows = [[row.first, row.stop] for row in plan.rows if row.first < MAX_SEGMENTS_SHOWN]
    return {
        "prefix_tokens": len(segments.prefix_ids),
        "segments": len(segments.tails),
        "segments_per_item": segments.segments_per_item,
        "prefix_lens": segments.prefix_lens[:MAX_SEGMENTS_SHOWN].tolist(),
        "tail_lens": segments.tails.lens[:MAX_SEGMENTS_SHOWN].tolist(),
        "rows": rows,
    }


def inspected_item(
    plan: ScorePlan,
    prompt: Prompt,
    vocabulary_logits: NDArray[np.float32],  # [V] at the scored position
    top_k: int,
    tokenizer: TextTokenizer | None,
) -> Mapping[str, object]:
    """What the model saw of the request's only item, and which tokens it expects next."""
    context = prompt.context(0)
    return {
        "tokens": [_described(token, tokenizer) for token in context.tolist()],
        "prefix_tokens": int(plan.segments.prefix_lens[0]),
        "scored_position": len(context) - 1,
        "top": _most_likely(vocabulary_logits, top_k, tokenizer),
    }


def _most_likely(logits: NDArray[np.float32], top_k: int, tokenizer: TextTokenizer | None) -> list[dict[str, object]]:
    """Best first, ties by id; their probabilities are of the whole vocabulary."""
    wide = logits.astype(np.float64)
    largest = wide.max(initial=-np.inf)
    log_normalizer = largest + np.log(np.exp(wide - largest).sum()) if len(wide) else 0.0
    best: Int32Array = np.argsort(-wide, kind="stable")[:top_k].astype(np.int32)
    return [
        {**_described(token, tokenizer), "logprob": logprob, "prob": float(np.exp(logprob))}
        for token, logprob in zip(best.tolist(), (wide[best] - log_normalizer).tolist(), strict=True)
    ]


def _described(token: int, tokenizer: TextTokenizer | None) -> dict[str, object]:
    """A token as people read it, where somebody can."""
    return {"id": token, "text": None if tokenizer is None else tokenizer.decode_token(token)}
