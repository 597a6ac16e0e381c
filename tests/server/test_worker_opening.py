"""How HTTP workers open: together, within a time, and no longer than their supervisor lives.

`--open-until`: all workers but the first wait for this file before they can serve.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import psutil
import pytest

from prefixwise.server.usage import HEARTBEATS, Usage
from prefixwise.server.workers.channel import Channel, EngineUp
from prefixwise.server.workers.children import LOADING_SECONDS, OPENING_SECONDS, Child
from tests.server.app_client import IDS_REQUEST, error_of, expected_logits
from tests.server.real_requests import fetch
from tests.server.server_process import (
    WORKERS,
    ServerProcess,
    frozen,
    process_of,
    server_process,
    socket_folder,
    until,
)

SECONDS = 60.0
SCORES = expected_logits([1, 2, 3], [[4, 5], [6], []], [7, 8])
WATCHDOG_TIMEOUT = 20.0
ENGINE = EngineUp(1, "ipc:///engine-1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "open"


def score(url: str) -> httpx.Response:
    return fetch("POST", f"{url}/v1/score", json=IDS_REQUEST)


class TestReadiness:
    def test_no_worker_is_ready_before_all_are(self, file: Path) -> None:
        with opening_server(file) as server:
            until(lambda: file.with_suffix(".first").exists())
            for _ in range(50):  # the first one has opened meanwhile
                assert error_of(fetch("GET", f"{server.url}/health"))[2] == "not_ready"
            file.touch()
            until(lambda: fetch("GET", f"{server.url}/health").status_code == 200)
            assert [score(server.url).status_code for _ in range(16)] == [200] * 16

    def test_a_worker_that_takes_too_long_does_not_hold_the_others_up(self, file: Path) -> None:
        with opening_server(file, "--open-seconds=0.2") as server:
            server.wait_for_line("an HTTP worker is not ready after 0.2 s: the others serve without it")
            until(lambda: score(server.url).status_code == 200)
            file.touch()
            server.wait_for_line("ready on")
            until(lambda: {score(server.url).status_code for _ in range(16)} == {200})

    def test_connections_wait_for_a_worker_that_takes_the_place_of_another(self, file: Path) -> None:
        with opening_server(file) as server, ThreadPoolExecutor(32) as threads:
            file.touch()
            server.wait_for_line("ready on")
            file.unlink()
            os.kill(process_of(server, "HTTP worker 0"), signal.SIGKILL)
            server.wait_for_line("HTTP worker 0 has ended with signal SIGKILL")
            server.wait_for_line("started HTTP worker 0")
            patient = [threads.submit(score, server.url) for _ in range(16)]
            soon = [threads.submit(health_soon, server.url) for _ in range(16)]
            assert {each.result() for each in soon} <= {200, None}
            file.touch()
            server.wait_for_line("ready on")
            assert [each.result().status_code for each in patient] == [200] * 16

    def test_they_hear_at_once_that_the_engine_has_ended_meanwhile(self, file: Path, tmp_path: Path) -> None:
        loading = tmp_path / "loading"
        loading.touch()
        with opening_server(file, f"--load-until={loading}") as server:
            file.touch()
            server.wait_for_line("ready on")
            file.unlink()
            loading.unlink()
            os.kill(process_of(server, "HTTP worker 0"), signal.SIGKILL)
            server.wait_for_line("started HTTP worker 0")
            os.kill(process_of(server, "the engine process"), signal.SIGKILL)
            server.wait_for_line("started the engine process")
            until(lambda: {error_of(score(server.url))[2] for _ in range(16)} == {"engine_restarting"})
            file.touch()
            loading.touch()
            server.wait_for_line("ready on")
            assert {score(server.url).status_code for _ in range(16)} == {200}


class TestHanging:
    """A worker whose tokenizer load never ends, or that is frozen before it is ready."""

    @pytest.mark.parametrize("is_frozen", [False, True], ids=["hangs", "frozen"])
    def test_a_worker_that_does_not_open_is_replaced(self, file: Path, is_frozen: bool) -> None:
        with opening_server(file, "--opening-seconds=2", "--watchdog-timeout=4") as server:
            file.touch()
            server.wait_for_line("ready on")
            file.unlink()
            os.kill(process_of(server, "HTTP worker 0"), signal.SIGKILL)
            server.wait_for_line("started HTTP worker 0")
            worker = process_of(server, "HTTP worker 0")
            until(lambda: worker in loading(file))
            with frozen(worker) if is_frozen else nullcontext():
                server.wait_for_line("HTTP worker 0 is not ready after .* s: killed")
            file.touch()
            server.wait_for_line("HTTP worker 0 has ended with signal SIGKILL: starting it again")
            server.wait_for_line("ready on")
            assert [score(server.url).json()["scores"] for _ in range(8)] == [SCORES] * 8

    def test_it_ends_with_its_supervisor(self, file: Path) -> None:
        with opening_server(file) as server:
            server.wait_for_line("started HTTP worker 1")
            until(lambda: bool(loading(file)))
            processes = psutil.Process(server.process.pid).children(recursive=True)
            folder = socket_folder(server)
            assert len(processes) == 3
            server.signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(processes, SECONDS)
            assert alive == []
            assert not folder.exists()

    def test_it_does_not_hold_the_shutdown_up(self, file: Path) -> None:
        with opening_server(file, "--shutdown-grace=0.1") as server:
            until(lambda: bool(loading(file)))
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        assert server.log[-1].endswith("stopped")
        assert not any("does not end" in line for line in server.log)


class TestOpeningTime:
    @pytest.fixture
    def killed(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The process ids of the children that were."""
        found: list[int] = []
        monkeypatch.setattr(Child, "kill", lambda child: found.append(child.pid))
        return found

    @pytest.fixture
    def worker(self) -> Iterator[Child]:
        ours, theirs = Channel.pair()
        yield Child("HTTP worker 0", 0, 1234, ours)
        for end in (ours, theirs):
            end.close()

    @pytest.mark.parametrize(
        ("timeout", "seconds", "is_killed"),
        [
            (WATCHDOG_TIMEOUT, OPENING_SECONDS - 1, False),
            (WATCHDOG_TIMEOUT, OPENING_SECONDS + 2, True),
            (2 * OPENING_SECONDS, 2 * OPENING_SECONDS - 1, False),
            (2 * OPENING_SECONDS, 2 * OPENING_SECONDS + 2, True),
            (0.0, 10 * OPENING_SECONDS, False),
        ],
    )
    def test_it_is_that_of_the_watchdog_or_some_minutes(
        self,
        worker: Child,
        pass_time: Callable[[float], None],
        killed: list[int],
        timeout: float,
        seconds: float,
        is_killed: bool,
    ) -> None:
        worker.open(ENGINE)
        watch(worker, pass_time, seconds, timeout)
        assert killed == [worker.pid] * is_killed

    def test_it_begins_with_the_engine_process_and_ends_with_it(
        self, worker: Child, pass_time: Callable[[float], None], killed: list[int]
    ) -> None:
        watch(worker, pass_time, 2 * OPENING_SECONDS)
        worker.open(ENGINE)
        watch(worker, pass_time, OPENING_SECONDS - 1)
        worker.lose_engine()
        watch(worker, pass_time, 2 * OPENING_SECONDS)
        worker.open(ENGINE)
        watch(worker, pass_time, OPENING_SECONDS - 1)
        assert killed == []

    def test_a_worker_that_was_ready_shows_heartbeats_instead(
        self, worker: Child, pass_time: Callable[[float], None], killed: list[int]
    ) -> None:
        usage = Usage()
        worker.open(ENGINE)
        worker.become_ready(usage)
        worker.lose_engine()
        worker.open(ENGINE)
        for _ in range(int(2 * OPENING_SECONDS)):
            usage.add(HEARTBEATS, 1)
            watch(worker, pass_time, 1.0)
        assert killed == []
        watch(worker, pass_time, WATCHDOG_TIMEOUT + 2)
        assert killed == [worker.pid]


def test_an_engine_process_that_loads_says_so_every_minute(
    pass_time: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing bounds that: weights may come from far away."""
    caplog.set_level(logging.INFO, "prefixwise")
    ours, theirs = Channel.pair()
    engine, usage = Child("the engine process", None, 1234, ours), Usage()
    watch(engine, pass_time, LOADING_SECONDS - 1, timeout=0.0)
    assert caplog.messages == []
    watch(engine, pass_time, 2 * LOADING_SECONDS, timeout=0.0)
    assert caplog.messages == [f"the engine process is still loading after {seconds} s" for seconds in (60, 120)]
    engine.become_ready(usage)
    for _ in range(int(2 * LOADING_SECONDS)):
        usage.add(HEARTBEATS, 1)
        watch(engine, pass_time, 1.0, timeout=0.0)
    assert len(caplog.messages) == 2
    for end in (ours, theirs):
        end.close()


def watch(worker: Child, pass_time: Callable[[float], None], seconds: float, timeout: float = WATCHDOG_TIMEOUT) -> None:
    """As the supervisor does, for so long."""
    for _ in range(int(seconds)):
        pass_time(1.0)
        worker.watch(timeout)


def loading(file: Path) -> set[int]:
    """The processes that wait for the file, or have waited."""
    return {int(each.suffix[1:]) for each in file.parent.glob("open.[0-9]*")}


@contextmanager
def opening_server(file: Path, *options: str) -> Iterator[ServerProcess]:
    """It listens. Its workers wait for the file, and not any more in the end."""
    with server_process(WORKERS, f"--open-until={file}", *options, wait=False) as server:
        try:
            server.wait_until_listening()
            yield server
        finally:
            file.touch()  # a thread that waits would keep its process alive


def health_soon(url: str) -> int | None:
    """None: nothing came so soon."""
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code
    except httpx.ReadTimeout:
        return None
