from __future__ import annotations

import pytest

from prefixwise.bench.render.numbers import (
    change_percent,
    difference,
    milliseconds,
    percent,
    ratio,
    share,
    short_number,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (12_345.6, "12,346"),
        (123.45, "123.5"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.0, "0.00"),
        (0.00123, "0.0012"),
        (-1500.4, "-1,500"),
    ],
)
def test_figures_have_about_four_digits(value: float | None, shown: str) -> None:
    assert short_number(value) == shown


def test_long_times_are_in_seconds() -> None:
    assert [milliseconds(9_999.0), milliseconds(10_000.0), milliseconds(None)] == ["9,999 ms", "10.0 s", "-"]


def test_changes_have_a_sign_and_hardly_any_is_none() -> None:
    assert [percent(20.04), percent(-3.0), percent(-0.04), percent(None)] == ["+20.0%", "-3.0%", "0.0%", "-"]


def test_a_change_needs_both_and_something_to_compare_with() -> None:
    assert change_percent(150.0, 100.0) == 50.0
    assert change_percent(80.0, 100.0) == -20.0
    assert [change_percent(None, 1.0), change_percent(1.0, None), change_percent(1.0, 0.0)] == [None, None, None]


def test_small_differences_have_an_exponent_and_zero_is_zero() -> None:
    shown = [difference(value) for value in (None, 0.0, 0.000123, 0.0125)]
    assert shown == ["-", "0", "1.2e-04", "0.0125"]


def test_shares_and_ratios() -> None:
    assert [share(3, 4), share(0, 0), ratio(1.234), ratio(None)] == ["3 of 4 (75.0%)", "0 of 0", "1.23x", "-"]
