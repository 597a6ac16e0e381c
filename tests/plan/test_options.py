"""Options of the plan: what is legal, and what a device settles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from prefixwise.contract.errors import RequestError
from prefixwise.forward.backend import BackendInfo
from prefixwise.plan.options import PlanOptions


def info(kind: Literal["cpu", "gpu", "tpu"]) -> BackendInfo:
    return BackendInfo("fake", kind, kind, "float32", True, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "fast"}, "algorithm must be auto, serial, packed or prefill_extend, got 'fast'"),
        ({"mask": "sparse"}, "mask must be auto, dense or segment, got 'sparse'"),
        ({"chunk_size": -1}, "chunk_size must be a whole number of 0 or more items, got -1"),
        ({"chunk_size": "3"}, "chunk_size must be a whole number of 0 or more items, got '3'"),
        ({"token_budget": 0}, "token_budget must be a whole number of at least 1 token, got 0"),
        ({"token_budget": 1.5}, "token_budget must be a whole number of at least 1 token, got 1.5"),
        (
            {"segment_fallback_threshold": -1},
            "segment_fallback_threshold must be a whole number of 0 or more tokens, got -1",
        ),
    ],
)
def test_an_illegal_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        PlanOptions(**options)
    name = next(iter(options))
    assert caught.value.message == message
    assert (caught.value.code, caught.value.param) == (f"invalid_{name}", name)


def test_the_smallest_legal_values() -> None:
    options = PlanOptions(chunk_size=0, token_budget=1, segment_fallback_threshold=0)
    assert options.resolve(info("cpu")) is options


@pytest.mark.parametrize("budget", [16_384, 65_536])
def test_the_budget_is_the_backends_unless_one_is_given(budget: int) -> None:
    backend = replace(info("gpu"), token_budget=budget)
    resolved = PlanOptions(chunk_size=3).resolve(backend)
    assert (resolved.token_budget, resolved.chunk_size) == (budget, 3)
    assert PlanOptions(token_budget=7).resolve(backend).token_budget == 7
