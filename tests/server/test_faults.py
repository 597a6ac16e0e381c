"""A device that fails, hangs or lies, as clients, balancers and operators see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.engine.health import STALL_SECONDS, EngineState
from prefixwise.engine.step_filler import StepFiller
from prefixwise.server.launch import ENGINE_FAILED_STATUS
from tests.engine.live import SECONDS, has
from tests.faults import SECRET, FaultyBackend, Kind
from tests.server.app_client import IDS_REQUEST, AppClient, app_client, error_of, expected_logits
from tests.server.real_requests import fetch
from tests.server.server_process import server_process

SCORES = expected_logits([1, 2, 3], [[4, 5], [6], []], [7, 8])
POISON = 99
POISONED = {**IDS_REQUEST, "query": [1, 2, POISON]}


@contextmanager
def faulty() -> Iterator[tuple[FaultyBackend, AppClient]]:
    before = set(threading.enumerate())
    faults = FaultyBackend(FakeBackend())
    try:
        with app_client(backend=faults, watchdog_timeout=300.0) as client:
            assert client.get("/health").status_code == 200
            yield faults, client
            faults.clear()
    finally:
        for thread in set(threading.enumerate()) - before:
            thread.join(SECONDS)


def metric(client: AppClient, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"prefixwise:{name} "))


def check_refused(client: AppClient, code: str, reason: str) -> None:
    """Every route that needs the engine says why, at once, and when to come back."""
    for answer in (client.get("/health"), client.post("/v1/score", IDS_REQUEST), client.post("/v1/score", {})):
        assert error_of(answer)[:3] == (503, "server_error", code)
        assert int(answer.headers["retry-after"]) > 0
        assert reason in answer.json()["message"]
        assert SECRET not in answer.text
    assert metric(client, "engine_healthy") == 0


class TestFaultsThatPass:
    """The server stays healthy."""

    @pytest.mark.parametrize("kind", ["raise", "exit", "shape", "dtype", "out_of_memory"])
    def test_a_request_that_did_nothing_wrong_gets_its_scores(self, kind: Kind) -> None:
        with faulty() as (faults, client):
            faults.inject(kind)
            assert client.post("/v1/score", IDS_REQUEST).json()["scores"] == SCORES
            assert client.get("/health").json() == {"status": "ok"}
            figures = [
                metric(client, name) for name in ("steps_failed_total", "requests_rerun_total", "engine_healthy")
            ]
            assert figures == [1, 1, 1]

    @pytest.mark.parametrize("kind", ["raise", "exit", "shape", "dtype", "nan", "out_of_memory"])
    def test_a_request_that_fails_alone_gets_an_error_and_no_other_does(
        self, kind: Kind, caplog: pytest.LogCaptureFixture
    ) -> None:
        with faulty() as (faults, client):
            faults.inject(kind, times=None, when=has(POISON))
            for _ in range(4):  # one client cannot end the server
                answer = client.post("/v1/score", POISONED)
                assert error_of(answer)[:3] == (500, "server_error", "internal_error")
                assert SECRET not in answer.text
            assert client.post("/v1/score", IDS_REQUEST).json()["scores"] == SCORES
            assert client.get("/health").status_code == 200
            if kind != "nan":
                assert caplog.messages.count("a forward pass failed") == 4 * 2
                assert metric(client, "requests_rerun_total") == 4


class TestFaultsThatStay:
    @pytest.mark.parametrize("kind", ["raise", "exit", "shape", "dtype"])
    def test_a_device_that_fails_for_good_is_503_everywhere(self, kind: Kind) -> None:
        with faulty() as (faults, client):
            faults.inject(kind, times=None)
            answer = client.post("/v1/score", IDS_REQUEST)
            assert error_of(answer)[:3] == (503, "server_error", "engine_failed")
            check_refused(client, "engine_failed", "the device has failed")
            assert client.get("/server_info").json()["status"] == "failed"

    def test_a_device_that_gives_nan_alone(self) -> None:
        with faulty() as (faults, client):
            faults.inject("nan", times=None)
            for _ in range(3):
                assert client.post("/v1/score", IDS_REQUEST).status_code == 500
            assert client.engine.scheduler.health.failed.wait(SECONDS)
            check_refused(client, "engine_failed", "the device has failed")

    def test_a_scheduler_that_died(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def die(*_: object) -> None:
            raise SystemExit

        with faulty() as (_, client):
            monkeypatch.setattr(StepFiller, "fill", die)
            assert error_of(client.post("/v1/score", IDS_REQUEST))[2] == "engine_failed"
            check_refused(client, "engine_failed", "the scheduler has died")

    def test_a_device_that_hangs_and_comes_back(self) -> None:
        with faulty() as (faults, client), ThreadPoolExecutor(2) as pool:
            client.post("/v1/score", IDS_REQUEST)  # so that the usual time is known
            watchdog = client.engine.scheduler._watchdog
            faults.inject("hang")
            hanging = pool.submit(client.post, "/v1/score", IDS_REQUEST)
            assert faults.hangs.wait(SECONDS)
            watchdog.look(0.0)
            watchdog.look(STALL_SECONDS + 1)
            check_refused(client, "engine_stalled", "the device has been busy")
            assert client.get("/server_info").json()["status"] == EngineState.STALLED
            faults.release()
            assert hanging.result(SECONDS).json()["scores"] == SCORES
            watchdog.look(1.0)
            assert client.get("/health").status_code == 200
            assert client.post("/v1/score", IDS_REQUEST).json()["scores"] == SCORES


class TestProcess:
    """What cannot recover ends the process, so that a supervisor starts another."""

    @pytest.mark.parametrize("kind", ["raise", "hang"])
    def test_it_answers_what_it_has_and_exits_with_its_own_status(self, kind: Kind) -> None:
        with server_process(f"--fault={kind}", "--watchdog-timeout=0.5") as server:
            answers: list[httpx.Response] = []
            with ThreadPoolExecutor(3) as pool:
                for answer in pool.map(lambda _: fetch("POST", f"{server.url}/v1/score", json=IDS_REQUEST), range(3)):
                    answers.append(answer)
            assert server.wait() == ENGINE_FAILED_STATUS
        for answer in answers:
            assert error_of(answer)[:3] == (503, "server_error", "engine_failed")
        assert any("CRITICAL" in line and "the engine has failed" in line for line in server.log)
        assert f"exiting with status {ENGINE_FAILED_STATUS}" in server.log[-1]
