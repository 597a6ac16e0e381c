"""`--backend fake`: a whole engine around arithmetic, for trials of everything but the model."""

from __future__ import annotations

import time

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.backends.fake import fake_logits
from prefixwise.backends.load import FAKE_STEP_VARIABLE
from prefixwise.contract.errors import BackendError


def test_its_scores_can_be_computed_by_hand() -> None:
    with Scorer(backend="fake") as scorer:
        result = scorer.score([5, 6, 7], [[8, 9], [10]], label_token_ids=[11, 12], score_mode="logit")
    for tail, scores in zip(([8, 9], [10]), result.scores, strict=True):
        expected = fake_logits(np.array([5, 6, 7, *tail], np.int32), np.array([11, 12], np.int32))
        assert scores == pytest.approx(expected.tolist())


def test_a_step_takes_as_long_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAKE_STEP_VARIABLE, "0.2")
    with Scorer(backend="fake") as scorer:
        begin = time.perf_counter()
        scorer.score([5], [[8]], label_token_ids=[11])
        assert time.perf_counter() - begin >= 0.2


@pytest.mark.parametrize("given", ["-1", "nan", "soon"])
def test_an_impossible_time_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAKE_STEP_VARIABLE, given)
    with pytest.raises(
        BackendError, match=f"PREFIXWISE_FAKE_STEP_SECONDS must be a number of seconds .* got '{given}'"
    ):
        Scorer(backend="fake")
