"""What one front can know of the replicas' loads."""

from __future__ import annotations

from prefixwise.cluster.routing import ReplicaLoad, RoutingOptions, estimate_tokens, order_replicas


def test_a_front_that_is_alone_knows_what_it_sent() -> None:
    assert estimate_tokens({"a": 300, "b": 100}, {"a": 0, "b": 250}) == {"a": 300, "b": 100}


def test_one_of_several_fronts_sees_its_part_of_the_whole() -> None:
    assert estimate_tokens({"a": 300, "b": 100}, {"a": 1000, "b": 600, "c": 0}) == {"a": 1200, "b": 400, "c": 0}


def test_what_was_said_moves_no_load_from_one_replica_to_another() -> None:
    one, other = (estimate_tokens({"a": 50, "b": 50}, said) for said in ({"a": 900, "b": 100}, {"a": 100, "b": 900}))
    assert one == other == {"a": 500, "b": 500}


def test_a_front_that_waits_for_nobody_takes_all_for_idle() -> None:
    assert estimate_tokens({}, {"a": 1000, "b": 0}) == {"a": 0, "b": 0}


def test_replicas_that_are_no_more_are_not_counted() -> None:
    assert estimate_tokens({"gone": 500, "a": 100}, {"a": 200}) == {"a": 200}


def test_of_replicas_that_are_equally_idle_the_first_is_taken() -> None:
    loads = {name: ReplicaLoad(0, 2048) for name in ("b", "a")}
    assert order_replicas(None, loads, RoutingOptions()) == ["b", "a"]
