from __future__ import annotations

from collections import Counter

import pytest

from prefixwise.cluster.routing import (
    ReplicaLoad,
    RoutingOptions,
    order_replicas,
    overloaded_replicas,
    rank_replicas,
)

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [str(number).encode() for number in range(4000)]


def loads(**tokens: int) -> dict[str, ReplicaLoad]:
    return {name: ReplicaLoad(count, 100) for name, count in tokens.items()}


class TestRanking:
    def test_is_the_same_for_everybody(self) -> None:
        assert all(rank_replicas(key, NAMES) == rank_replicas(key, NAMES[::-1]) for key in KEYS[:100])

    def test_shares_homes_out_evenly(self) -> None:
        homes = Counter(rank_replicas(key, NAMES)[0] for key in KEYS)
        assert set(homes) == set(NAMES)
        assert max(homes.values()) < 1.2 * len(KEYS) / len(NAMES)

    def test_a_replica_that_goes_moves_only_its_own_queries(self) -> None:
        for key in KEYS[:500]:
            before = rank_replicas(key, NAMES)
            after = rank_replicas(key, NAMES[1:])
            assert after == [name for name in before if name != NAMES[0]]

    def test_the_queries_of_one_that_goes_are_shared_out_among_all(self) -> None:
        orphans = [key for key in KEYS if rank_replicas(key, NAMES)[0] == NAMES[0]]
        assert {rank_replicas(key, NAMES[1:])[0] for key in orphans} == set(NAMES[1:])


class TestOrder:
    def test_home_comes_first_while_nobody_is_overloaded(self) -> None:
        idle = loads(a=0, b=0, c=0)
        for key in KEYS[:50]:
            assert order_replicas(key, idle, RoutingOptions()) == rank_replicas(key, ["a", "b", "c"])

    def test_home_is_kept_while_the_wait_is_short(self) -> None:
        """400 tokens are four steps of 100: that long a query waits for its home, though the others are idle."""
        key = next(key for key in KEYS if rank_replicas(key, ["a", "b", "c"])[0] == "a")
        assert order_replicas(key, loads(a=400, b=0, c=0), RoutingOptions(patience=4))[0] == "a"
        assert order_replicas(key, loads(a=401, b=0, c=0), RoutingOptions(patience=4))[0] != "a"

    def test_home_is_kept_where_all_are_as_busy(self) -> None:
        key = next(key for key in KEYS if rank_replicas(key, ["a", "b", "c"])[0] == "a")
        assert order_replicas(key, loads(a=9000, b=8000, c=8500), RoutingOptions())[0] == "a"

    def test_what_is_too_hot_for_one_goes_to_its_second_choice(self) -> None:
        for key in KEYS[:50]:
            home, second, third = rank_replicas(key, ["a", "b", "c"])
            hot = loads(**{home: 5000, second: 100, third: 0})
            assert order_replicas(key, hot, RoutingOptions()) == [second, third, home]

    def test_without_a_query_the_idlest_comes_first(self) -> None:
        assert order_replicas(None, loads(a=3, b=1, c=2), RoutingOptions()) == ["b", "c", "a"]

    def test_names_every_replica_once(self) -> None:
        for key in (None, b"key"):
            ordered = order_replicas(key, loads(a=5000, b=10, c=7000, d=0), RoutingOptions())
            assert sorted(ordered) == ["a", "b", "c", "d"]

    def test_of_no_replicas_is_empty(self) -> None:
        assert order_replicas(b"key", {}, RoutingOptions()) == []

    def test_never_are_all_overloaded(self) -> None:
        assert overloaded_replicas(loads(a=10**9, b=10**9), RoutingOptions(patience=0, share=1)) == frozenset()


@pytest.mark.parametrize(("name", "value"), [("patience", -1.0), ("patience", float("nan")), ("share", 0.9)])
def test_options_that_cannot_be_meant_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        RoutingOptions(**{name: value})
