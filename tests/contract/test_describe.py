"""How error messages show what came."""

from __future__ import annotations

import pytest

from prefixwise.contract.describe import describe, quote


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x", '"x" (str)'),
        ('say "hi"\n', r'"say \"hi\"\n" (str)'),
        ("naïve", '"naïve" (str)'),
        (True, "True (bool)"),
        (None, "None (NoneType)"),
        (1.5, "1.5 (float)"),
        ([1, 2], "[1, 2] (list)"),
        ({"a": 1}, "{'a': 1} (dict)"),
    ],
)
def test_a_value_is_shown_with_its_type(value: object, shown: str) -> None:
    assert describe(value) == shown


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000)), {"a": ["x" * 10_000] * 100}])
def test_a_long_value_is_cut_to_one_short_line(value: object) -> None:
    shown = describe(value)
    assert "..." in shown
    assert len(shown) < 120


@pytest.mark.parametrize("nested", [False, True])
def test_a_number_that_python_will_not_print_is_described(nested: bool) -> None:
    shown = describe([10**5000] if nested else 10**5000)
    assert shown.startswith("a number of thousands of digits")


def test_a_lone_surrogate_is_spelled_out_so_that_the_message_can_be_sent() -> None:
    assert quote("a\ud800") == r'"a\ud800"'
