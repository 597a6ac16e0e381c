"""`/metrics`: what is counted, under which names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.app_client import IDS_REQUEST, AppClient, HeldBackend, app_client

SCORE = (("route", "/v1/score"), ("status", "200"))


@pytest.fixture
def fresh() -> Iterator[AppClient]:
    with app_client() as made:
        yield made


def figures(client: AppClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels."""
    text = client.get("/metrics").text
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_figure_that_operators_were_promised_is_there(fresh: AppClient) -> None:
    fresh.post("/v1/score", IDS_REQUEST)
    names = {name.removeprefix("prefixwise:") for name, _ in figures(fresh)}
    assert names >= {
        "requests_total",
        "request_seconds_bucket",
        "queue_seconds_bucket",
        "items_scored_total",
        "tokens_scored_total",
        "prefix_cache_queried_tokens_total",
        "prefix_cache_hit_tokens_total",
        "requests_running",
        "requests_waiting",
        "tokens_running",
        "tokens_waiting",
        "batch_fill_ratio",
        "device_seconds_total",
        "compilations_total",
        "algorithm_chosen_total",
    }


def test_requests_items_and_tokens_are_counted(fresh: AppClient) -> None:
    for _ in range(3):
        fresh.post("/v1/score", IDS_REQUEST)
    fresh.post("/v1/score", {**IDS_REQUEST, "items": [[1], [-1]], "on_item_error": "report"})
    fresh.post("/v1/score", {**IDS_REQUEST, "query": []})
    found = figures(fresh)
    assert found["prefixwise:requests_total", SCORE] == 4
    assert found["prefixwise:requests_total", (("route", "/v1/score"), ("status", "400"))] == 1
    assert found["prefixwise:request_seconds_count", (("route", "/v1/score"),)] == 5
    assert found["prefixwise:queue_seconds_count", ()] == 4
    assert found["prefixwise:items_scored_total", ()] == 3 * 3 + 1
    assert found["prefixwise:tokens_scored_total", ()] == 3 * 6 + 4
    assert found["prefixwise:device_seconds_total", ()] > 0
    chosen = {labels: value for (name, labels), value in found.items() if name == "prefixwise:algorithm_chosen_total"}
    assert sum(chosen.values()) == 4


def test_what_steps_are_bounded_by_is_shown(fresh: AppClient) -> None:
    """The cost model, and the tokens of a step that follow from it; `/server_info` has the same."""
    found, stats = figures(fresh), fresh.get("/server_info").json()["stats"]
    assert found["prefixwise:step_tokens_max", ()] == stats["max_step_tokens"] > 0
    for part in ("forward", "token", "pair"):
        assert found["prefixwise:cost_seconds", (("per", part),)] == stats[f"seconds_per_{part}"] > 0


def test_strangers_cannot_make_up_labels(fresh: AppClient) -> None:
    for number in range(5):
        fresh.get(f"/wp-admin/{number}")
    fresh.request("DELETE", "/v1/prefix/made-up")
    routes = {dict(labels)["route"] for name, labels in figures(fresh) if name == "prefixwise:requests_total"}
    assert routes == {"other", "/v1/prefix/{prefix_id}"}


def test_the_prefix_cache_is_counted_in_tokens(fresh: AppClient) -> None:
    body = {**IDS_REQUEST, "query": [1] * 300, "algorithm": "prefill_extend"}
    answers = [fresh.post("/v1/score", body).json() for _ in range(2)]
    found = figures(fresh)
    assert found["prefixwise:prefix_cache_queried_tokens_total", ()] == 600
    cached = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found["prefixwise:prefix_cache_hit_tokens_total", ()] == cached > 0


def test_what_runs_and_waits_is_shown() -> None:
    backend = HeldBackend()

    async def look() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        request = asyncio.create_task(client.send("POST", "/v1/score", json=IDS_REQUEST))
        await asyncio.to_thread(backend.has_begun.wait, 10)
        found = await asyncio.to_thread(figures, client)
        backend.let_go.set()
        await request
        return found

    with app_client(backend=backend) as client:
        during = asyncio.run(look())
        assert during["prefixwise:requests_running", ()] == 1
        assert during["prefixwise:tokens_running", ()] > 0
        after = figures(client)
        assert (after["prefixwise:requests_running", ()], after["prefixwise:tokens_running", ()]) == (0, 0)


def test_several_servers_in_one_process_count_for_themselves(fresh: AppClient) -> None:
    fresh.post("/v1/score", IDS_REQUEST)
    with app_client() as other:
        assert ("prefixwise:requests_total", SCORE) not in figures(other)
