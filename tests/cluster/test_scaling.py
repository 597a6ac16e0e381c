from __future__ import annotations

from types import SimpleNamespace

import pytest

from prefixwise.cluster.scaling import QUEUED_TOKENS, QueuedTokensPolicy, desired_replicas


@pytest.mark.parametrize(("queued", "replicas"), [(0, 1), (1, 1), (100, 1), (101, 2), (1000, 10)])
def test_each_has_at_most_the_target_waiting(queued: float, replicas: int) -> None:
    assert desired_replicas(queued, 100) == replicas


@pytest.mark.parametrize("metrics", [None, {}, {"other": {"a": 1e9}}])
def test_replicas_that_have_said_nothing_have_nothing_waiting(metrics: object) -> None:
    assert QueuedTokensPolicy(100)(SimpleNamespace(aggregated_metrics=metrics)) == (1, {})


def test_the_sum_over_replicas_counts() -> None:
    context = SimpleNamespace(aggregated_metrics={QUEUED_TOKENS: {"a": 150.0, "b": 160.0}})
    assert QueuedTokensPolicy(100)(context) == (4, {})
