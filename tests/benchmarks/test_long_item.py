"""The benchmark of a small request beside a long one, on a device that takes no time."""

from __future__ import annotations

import pytest

from benchmarks.long_item import Requests, turn
from tests.engine.live import VOCAB_SIZE, GatedBackend, live_engine


@pytest.mark.parametrize("kind", ["item", "query"])
def test_a_turn_measures_both_requests_and_the_cancellation(kind: str) -> None:
    backend = GatedBackend(is_open=True, max_whole_item=128, step_tokens=256, seconds_per_forward=0.001)
    with live_engine(backend) as engine:
        found = turn(engine, Requests(VOCAB_SIZE), kind, 1500)
        assert list(found) == ["alone", "beside", "step", "cancelled"]
        assert min(found["alone"], found["beside"], found["step"]) > 0
    assert max(batch.num_tokens for batch in backend.forwards) <= 256


def test_no_query_comes_twice() -> None:
    requests = Requests(1000)
    queries = [tuple(requests.small()["query"]) for _ in range(20)]
    assert len(set(queries)) == 20
