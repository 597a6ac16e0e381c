"""The wrong server: each fault is the one it says, on the requests that it is for, and on no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from prefixwise.bench.client import CallError, ScoreClient
from tests.bench.wrong_server import wrong_server
from tests.server.server_process import server_process

ITEMS = [[1, 2], [3, 4], [5, 6]]


@pytest.fixture(scope="module")
def good() -> Iterator[str]:
    with server_process() as running:
        yield running.url


def ask(url: str, items: list[list[int]] = ITEMS, timeout_sec: float = 30.0) -> list[list[float]]:
    body: dict[str, Any] = {"query": [7, 8], "items": items, "label_token_ids": [3, 5], "apply_softmax": True}
    with ScoreClient(url, timeout_sec=timeout_sec) as client:
        return client.score(body).scores


def test_a_leak_moves_an_item_when_another_changes_and_spares_one_alone(good: str) -> None:
    with wrong_server(good, "leak") as url:
        first, second = ask(url), ask(url, [[1, 2], [3, 4], [5, 7]])
        assert first[0] != second[0]
        assert ask(url) == first
        assert ask(url, ITEMS[:1]) == ask(good, ITEMS[:1])


def test_a_drift_is_three_hundredths_on_every_score(good: str) -> None:
    with wrong_server(good, "drift") as url:
        drifted = [score for row in ask(url) for score in row]
    right = [score for row in ask(good) for score in row]
    assert drifted == pytest.approx([score + 0.03 for score in right], abs=1e-12)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("error", "http_error"),
        ("oom", "oom"),
        ("garbage", "bad_json"),
        ("short", "bad_response"),
        ("nan", "bad_response"),
        ("huge", "bad_response"),
        ("deep", "bad_json"),
    ],
)
def test_a_fault_gives_the_reason_it_is_for(good: str, fault: Any, reason: str) -> None:
    with wrong_server(good, fault) as url, pytest.raises(CallError) as raised:
        ask(url)
    assert raised.value.reason == reason


def test_a_late_answer_is_the_right_one_for_who_waits(good: str) -> None:
    with wrong_server(good, "late", seconds=0.3) as url:
        assert ask(url) == ask(good)
        with pytest.raises(CallError, match="timeout"):
            ask(url, timeout_sec=0.05)


def test_an_answer_that_trickles_is_the_right_one_for_who_waits(good: str) -> None:
    with wrong_server(good, "trickle", seconds=0.01) as url:
        assert ask(url) == ask(good)


def test_only_requests_of_so_many_items_are_spoilt_and_only_so_often(good: str) -> None:
    with wrong_server(good, "error", only_items=3, times=1) as url:
        assert ask(url, ITEMS[:2]) == ask(good, ITEMS[:2])
        with pytest.raises(CallError):
            ask(url)
        assert ask(url) == ask(good)


def test_other_routes_are_the_good_servers(good: str) -> None:
    with wrong_server(good, "error") as url:
        assert httpx.get(f"{url}/server_info").json()["status"] == "ready"
