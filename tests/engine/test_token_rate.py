"""The measured token rate: what counts, how fast it follows, when it is forgotten."""

from __future__ import annotations

import pytest

from prefixwise.engine.token_rate import AVERAGE_SECONDS, FORGET_SECONDS, MAX_CHANGE, TokenRate

NOW = 1000.0


def rate_of(*steps: tuple[int, float], least_tokens: int = 100) -> float | None:
    """The rate after steps of so many tokens and seconds, one after the other."""
    rate, now = TokenRate(least_tokens), NOW
    for tokens, seconds in steps:
        now += seconds
        rate.record(tokens, seconds, now)
    return rate.at(now)


def test_before_the_first_step_it_is_unknown() -> None:
    assert rate_of() is None


def test_equal_steps_give_their_rate() -> None:
    assert rate_of(*[(200, 0.5)] * 50) == pytest.approx(400.0)


def test_it_is_tokens_by_seconds_not_the_mean_of_rates() -> None:
    assert rate_of(*[(200, 0.1), (200, 0.3)] * 200) == pytest.approx(1000.0, rel=0.02)


def test_a_small_step_counts_only_if_it_is_faster() -> None:
    """Its fixed costs outweigh its tokens."""
    assert rate_of((99, 0.001)) is None
    assert rate_of((200, 0.5), (10, 0.5)) == 400.0
    faster = rate_of((200, 0.5), (99, 0.1))
    assert faster is not None and 400.0 < faster < 990.0


def test_it_follows_a_device_that_becomes_slower_within_its_average() -> None:
    steps = [(1000, 1.0)] * 30 + [(500, 1.0)] * round(3 * AVERAGE_SECONDS)
    assert rate_of(*steps) == pytest.approx(500.0, rel=0.1)


def test_one_step_that_waits_for_a_compiler_changes_little() -> None:
    slow = rate_of(*[(1000, 1.0)] * 30, (1000, 60.0))
    assert slow is not None and slow > 1000.0 / (1 + MAX_CHANGE / AVERAGE_SECONDS * 1.5)


def test_a_first_step_that_waits_for_a_compiler_is_forgotten_with_the_next() -> None:
    assert rate_of((1000, 60.0), (1000, 1.0)) == 1000.0


def test_a_rate_that_nothing_confirms_is_forgotten() -> None:
    """Else a slow minute could make the server refuse for ever what it never tries."""
    rate = TokenRate(100)
    rate.record(200, 1.0, NOW)
    assert rate.at(NOW + FORGET_SECONDS) == 200.0
    assert rate.at(NOW + FORGET_SECONDS + 1) is None
    rate.record(10, 1.0, NOW + 200.0)
    assert rate.at(NOW + 200.0) is None, "a small step confirms nothing"
    rate.record(100, 1.0, NOW + 201.0)
    assert rate.at(NOW + 201.0) == 100.0


def test_steps_without_time_do_not_divide_by_zero() -> None:
    assert rate_of((200, 0.0)) is not None
