"""Draining, without a process: what is in flight ends, or is cut off."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from prefixwise.contract.errors import UnavailableError
from prefixwise.server.service import Lifecycle, Phase
from tests.server.app_client import IDS_REQUEST, AppClient, HeldBackend, app_client, error_of


def test_only_the_ready_phase_takes_work() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(UnavailableError) as caught:
        lifecycle.check_ready()
    assert caught.value.code == "not_ready"
    lifecycle.become_ready()
    lifecycle.check_ready()
    asyncio.run(lifecycle.drain(0))
    assert lifecycle.phase is Phase.STOPPED
    with pytest.raises(UnavailableError) as caught:
        lifecycle.check_ready()
    assert caught.value.code == "shutting_down"


async def drain(client: AppClient, backend: HeldBackend, grace: float, *, let_go: bool) -> list[httpx.Response]:
    """Two requests in flight and one that comes while the server drains, whose answer is the last."""
    requests = [asyncio.create_task(client.send("POST", "/v1/score", json=IDS_REQUEST)) for _ in range(2)]
    await asyncio.to_thread(backend.has_begun.wait, 10)
    draining = asyncio.create_task(client.service.lifecycle.drain(grace))
    await asyncio.sleep(0)
    late = await client.send("POST", "/v1/score", json=IDS_REQUEST)
    if let_go:
        backend.let_go.set()
    await draining
    backend.let_go.set()
    assert client.service.lifecycle.num_in_flight == 0
    return [*(await asyncio.gather(*requests)), late]


def test_requests_in_flight_finish_and_new_ones_get_503() -> None:
    backend = HeldBackend()
    with app_client(backend=backend) as client:
        first, second, late = asyncio.run(drain(client, backend, 30, let_go=True))
    assert (first.status_code, second.status_code) == (200, 200)
    assert error_of(late)[2] == "shutting_down"


def test_requests_longer_than_the_grace_period_get_503() -> None:
    backend = HeldBackend()
    with app_client(backend=backend) as client:
        answers = asyncio.run(drain(client, backend, 0.05, let_go=False))
    assert [error_of(answer) for answer in answers] == [(503, "server_error", "shutting_down", None)] * 3
