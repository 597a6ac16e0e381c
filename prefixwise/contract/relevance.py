"""From label scores to a document's relevance, on the host and in float64: the last arithmetic of a rerank request.

    softmax      raw: logit of the first label minus the log-sum-exp of the others'   relevance: sigmoid(raw)
    logit_diff   raw: logit of the first label minus that of the second               relevance: sigmoid(raw)
    logit        raw: logit of the label                                              relevance: sigmoid(raw)
    prob         raw: log-probability of the label                                    relevance: exp(raw)

The sigmoid of the first row is the first label's part of the softmax. A classifier's head is one row, which is the
difference of two labels' rows or one label's, and so its logit is `raw` already; or two rows, which are two labels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from prefixwise.contract.request import ScoreMode
from prefixwise.contract.score_modes import Float64Array, sigmoid

RelevanceKind = Literal["softmax", "logit", "logit_diff", "prob"]


def needed_score_mode(kind: RelevanceKind) -> ScoreMode:
    """What the labels are to be scored with."""
    return "logprob" if kind == "prob" else "logit"


def raw_scores(values: Float64Array) -> Float64Array:
    """[I] of [I, L]: the first label against the others, or by itself where it is the only one."""
    first, others = values[:, 0], values[:, 1:]
    return first - np.logaddexp.reduce(others, axis=1) if others.shape[1] else first


def relevance_scores(kind: RelevanceKind, raw: Float64Array) -> Float64Array:
    """[I], from 0 to 1."""
    return np.exp(raw) if kind == "prob" else sigmoid(raw)
