"""The small figures of the cluster's arithmetic."""

from __future__ import annotations

from benchmarks.cluster_parts import REPLICAS, measure


def test_every_part_costs_something_and_more_replicas_more() -> None:
    found = measure(rounds=1)
    assert all(value > 0 for value in found.values())
    assert 150 < found["request_bytes_per_item"] < 160  # 20 token ids of up to six digits, the query's share, the rest
    assert 15 < found["text_tokens_per_item"] < 20
    orders = [found[f"order_{number}_us"] for number in REPLICAS]
    assert orders == sorted(orders)
