"""`--http-workers`: a supervisor, an engine process and HTTP workers are one server, also when one of them dies.

How its workers open is in test_worker_opening.py. How it starts and stops is in test_process.py, overload in
test_overload.py, real models in test_real_scores.py, test_real_errors.py and test_real_concurrency.py: these run in
both forms.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

import httpx
import psutil
import pytest

from prefixwise.contract.errors import BackendError
from prefixwise.host import NO_THREAD
from prefixwise.server.launch import ENGINE_FAILED_STATUS
from prefixwise.server.workers.channel import Channel
from prefixwise.server.workers.children import DEATH_SECONDS, Deaths, fork
from prefixwise.server.workers.sockets import keep_socket_folder, make_socket_folder
from tests.server.app_client import IDS_REQUEST, error_of, expected_logits
from tests.server.real_requests import ask, fetch, leftovers, server_stats, wait_for_requests
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
MAX_QUEUED_TOKENS = 80_000
LIMITS = (
    f"--max-queued-tokens={MAX_QUEUED_TOKENS}",
    "--max-request-bytes=400000",
    '--options={"max_response_bytes": 3000000, "max_body_memory": 3400000}',
)


class Workers:
    """A server with two workers, whose device and whose loading a test can hold."""

    def __init__(self, server: ServerProcess, device: Path, loading: Path) -> None:
        self.server = server
        self.device = device  # forwards end while this file is there
        self.loading = loading  # models are loaded while this file is there

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """For tests that leave it as it was. Two of them may end its engine process: a third death would be the last."""
    files = [tmp_path_factory.mktemp("workers") / name for name in ("device", "loading")]
    for file in files:
        file.touch()
    options = (f"--hold-until={files[0]}", f"--load-until={files[1]}", "--delay=0.002", "--tokenizer", *LIMITS)
    with server_process(WORKERS, *options) as running:
        yield Workers(running, *files)


@pytest.fixture
def server(workers: Workers) -> Iterator[ServerProcess]:
    yield workers.server
    workers.device.touch()
    workers.loading.touch()


def score(url: str, **more: Any) -> httpx.Response:
    return fetch("POST", f"{url}/v1/score", json=IDS_REQUEST, **more)


def metric(server: ServerProcess, line: str) -> float:
    lines = fetch("GET", f"{server.url}/metrics").text.splitlines()
    return next((float(each.split()[1]) for each in lines if each.startswith(f"prefixwise:{line} ")), 0.0)


class TestOneServer:
    def test_any_worker_gives_the_scores(self, server: ServerProcess) -> None:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(score, [server.url] * 16))
        assert [answer.json()["scores"] for answer in answers] == [SCORES] * 16

    def test_metrics_are_those_of_all_workers(self, server: ServerProcess) -> None:
        counted = 'requests_total{route="/v1/score",status="200"}'
        before, items = metric(server, counted), metric(server, "items_scored_total")
        for _ in range(12):  # connections of their own, which the kernel spreads over both workers
            score(server.url)
        assert {metric(server, counted) for _ in range(8)} == {before + 12}
        assert metric(server, "items_scored_total") == items + 36
        assert metric(server, "device_seconds_total") > 0
        assert metric(server, "engine_healthy") == 1

    def test_a_prefix_is_pinned_for_all_workers(self, server: ServerProcess) -> None:
        made = fetch("POST", f"{server.url}/v1/prefix", json={"query": list(range(1, 200))}).json()
        for _ in range(8):
            listed = fetch("GET", f"{server.url}/v1/prefix").json()["data"]
            assert [each["id"] for each in listed] == [made["id"]]
        answer = ask(server, {**IDS_REQUEST, "query": list(range(1, 200))})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
        assert fetch("DELETE", f"{server.url}/v1/prefix/{made['id']}").status_code == 200
        assert error_of(fetch("DELETE", f"{server.url}/v1/prefix/{made['id']}"))[2] == "not_found"

    def test_errors_debug_and_text_are_as_in_one_process(self, server: ServerProcess) -> None:
        body = {"query": "ab", "items": ["c", "d"], "label_token_ids": [7, 8], "return_debug": True}
        requests: list[dict[str, Any]] = [
            body,
            {**IDS_REQUEST, "items": []},
            {**IDS_REQUEST, "label_token_ids": [9999]},
            {**IDS_REQUEST, "return_pooled_hidden_states": True},
            {**IDS_REQUEST, "items": [[1], [-1]], "on_item_error": "report"},
            {"requests": [IDS_REQUEST, {**IDS_REQUEST, "algorithm": "serial"}]},
        ]
        with server_process("--tokenizer", *LIMITS) as one:
            for request in requests:
                theirs, ours = (fetch("POST", f"{each.url}/v1/score", json=request) for each in (one, server))
                assert ours.status_code == theirs.status_code
                assert _comparable(ours.json()) == _comparable(theirs.json())

    def test_the_server_describes_its_engine(self, server: ServerProcess) -> None:
        info = fetch("GET", f"{server.url}/server_info").json()
        assert (info["status"], info["configuration"]["http_workers"]) == ("ready", 2)
        assert info["model"]["family"] == info["devices"]["backend"] == "fake"
        assert info["versions"]["numpy"]
        engine = psutil.Process(process_of(server, "the engine process"))
        assert info["memory"]["peak_host_bytes"] >= engine.memory_info().rss // 2

    def test_the_sockets_are_the_users_own(self, server: ServerProcess) -> None:
        assert socket_folder(server).stat().st_mode & 0o777 == 0o700


def _comparable(answer: Any) -> Any:
    """Without what differs from run to run."""
    for each in answer.get("results", [answer]):
        each.get("debug", {}).pop("milliseconds", None)
    return answer


class TestLimits:
    def test_a_deadline_and_a_client_that_goes_end_the_work(self, workers: Workers, server: ServerProcess) -> None:
        workers.device.unlink()
        late = score(server.url, headers={"X-Request-Timeout": "0.2"})
        assert error_of(late)[:3] == (504, "server_error", "deadline_exceeded")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/score", json=IDS_REQUEST, timeout=0.5)
        workers.device.touch()
        assert leftovers(server) == (0, 0, 0)
        assert score(server.url).json()["scores"] == SCORES

    def test_a_full_queue_refuses_on_all_workers(self, workers: Workers, server: ServerProcess) -> None:
        large = {**IDS_REQUEST, "items": [[4, 5, 6]] * 40_000}
        before = server_stats(server)["refused_requests"].get("queue_full", 0)
        workers.device.unlink()
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(fetch, "POST", f"{server.url}/v1/score", json=large)
            wait_for_requests(server, 1)
            assert server_stats(server)["running_tokens"] >= MAX_QUEUED_TOKENS
            for _ in range(6):
                refused = score(server.url)
                assert error_of(refused)[:3] == (429, "rate_limit_error", "queue_full")
                assert int(refused.headers["retry-after"]) > 0
            assert server_stats(server)["refused_requests"]["queue_full"] == before + 6
            workers.device.touch()
            assert len(first.result().json()["scores"]) == 40_000
        until(lambda: score(server.url).status_code == 200)  # the workers hear that there is room

    def test_body_memory_is_the_servers_not_each_workers(self, workers: Workers, server: ServerProcess) -> None:
        large = {**IDS_REQUEST, "items": [[4]] * 40_000}
        workers.device.unlink()
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(fetch, "POST", f"{server.url}/v1/score", json=large)
            wait_for_requests(server, 1)
            codes = {error_of(fetch("POST", f"{server.url}/v1/score", json=large))[2] for _ in range(4)}
            assert codes == {"body_memory_full"}
            workers.device.touch()
            assert len(first.result().json()["scores"]) == 40_000


class TestDeaths:
    def test_an_engine_that_is_killed_under_load_loses_no_request(
        self, workers: Workers, server: ServerProcess
    ) -> None:
        """Every request ends with its scores, or with a status that says to try again; then all is as before."""
        answers: list[list[tuple[dict[str, Any], httpx.Response]]] = [[] for _ in range(8)]
        stop = threading.Event()

        def send_until_stopped(seed: int) -> None:
            rng = random.Random(seed)
            with httpx.Client(timeout=SECONDS, verify=False) as client:
                while not stop.is_set():
                    body = {**IDS_REQUEST, "query": [rng.randrange(1, 500) for _ in range(rng.randint(1, 300))]}
                    answers[seed].append((body, client.post(f"{server.url}/v1/score", json=body)))
                    if answers[seed][-1][1].status_code != 200:
                        sleep(0.02)

        with ThreadPoolExecutor(8) as threads:
            sent = [threads.submit(send_until_stopped, seed) for seed in range(8)]
            try:
                until(lambda: all(len(each) > 4 for each in answers))
                workers.device.unlink()
                wait_for_requests(server, 8)
                os.kill(process_of(server, "the engine process"), signal.SIGKILL)
                workers.device.touch()
                server.wait_for_line("the engine process has ended with signal SIGKILL: starting it again")
                server.wait_for_line("ready on")
                until(lambda: server_stats(server)["items_scored"] > 100)  # of the second engine
            finally:
                stop.set()
            assert [each.exception() for each in sent] == [None] * 8
        for one in answers:
            assert {answer.status_code for _, answer in one} == {200, 503}  # each had a request in flight
            for body, answer in one:
                if answer.status_code == 200:
                    assert answer.json()["scores"] == expected_logits(body["query"], body["items"], [7, 8])
                else:
                    assert error_of(answer)[2] == "engine_restarting"
                    assert int(answer.headers["retry-after"]) > 0
        assert leftovers(server) == (0, 0, 0)
        assert score(server.url).json()["scores"] == SCORES

    def test_workers_say_so_while_another_engine_loads(self, workers: Workers, server: ServerProcess) -> None:
        workers.loading.unlink()
        os.kill(process_of(server, "the engine process"), signal.SIGKILL)
        server.wait_for_line("starting it again")
        until(lambda: all(fetch("GET", f"{server.url}/health").status_code == 503 for _ in range(8)))
        for answer in (fetch("GET", f"{server.url}/health"), score(server.url)):
            assert error_of(answer)[:3] == (503, "server_error", "engine_restarting")
            assert int(answer.headers["retry-after"]) > 0
        assert metric(server, "engine_healthy") == 0
        assert metric(server, 'process_restarts_total{process="engine"}') > 0
        assert fetch("GET", f"{server.url}/server_info").json()["status"] == "restarting"
        os.kill(process_of(server, "HTTP worker 1"), signal.SIGKILL)  # the next one hears of it when it starts
        server.wait_for_line("started HTTP worker 1")
        assert {error_of(score(server.url))[2] for _ in range(16)} <= {"engine_restarting", "not_ready"}
        until(lambda: {error_of(score(server.url))[2] for _ in range(8)} == {"engine_restarting"})
        workers.loading.touch()
        server.wait_for_line("ready on")
        assert score(server.url).json()["scores"] == SCORES

    def test_a_worker_that_is_killed_is_replaced(self, workers: Workers, server: ServerProcess) -> None:
        counted, restarts = 'requests_total{route="/v1/score",status="200"}', 'process_restarts_total{process="worker"}'
        for _ in range(12):  # connections of their own, which the kernel spreads over both workers
            score(server.url)
        before, restarts_before = metric(server, counted), metric(server, restarts)
        workers.device.unlink()
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(score, server.url) for _ in range(8)]
            wait_for_requests(server, 8)
            os.kill(process_of(server, "HTTP worker 0"), signal.SIGKILL)
            server.wait_for_line("HTTP worker 0 has ended with signal SIGKILL: starting it again")
            assert metric(server, counted) >= before, "while it is gone"
            server.wait_for_line("ready on")
            assert {metric(server, counted) for _ in range(4)} == {before}, "nobody was served meanwhile"
            assert metric(server, restarts) == restarts_before + 1
            workers.device.touch()
            kept = [each.result().json()["scores"] for each in answers if each.exception() is None]
        assert kept == [SCORES] * len(kept)  # those of the other worker
        assert leftovers(server) == (0, 0, 0)  # and the engine has dropped the rest
        assert [score(server.url).json()["scores"] for _ in range(8)] == [SCORES] * 8

    def test_metrics_are_shown_where_their_counts_cannot_be_kept(self) -> None:
        """As on a full disk: a worker keeps its counts in a file, for the one that takes its place."""
        with server_process(WORKERS) as server:
            folder = socket_folder(server)
            for worker in range(2):
                (folder / f"counts-{worker}.partial").mkdir()  # in the way
            for _ in range(12):
                score(server.url)
            counted = 'requests_total{route="/v1/score",status="200"}'
            assert {metric(server, counted) for _ in range(8)} == {12}
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        assert len([line for line in server.log if "would be lost if it ended now" in line]) == 2  # of each worker once
        assert not any("Traceback" in line for line in server.log)

    def test_a_worker_that_cannot_give_its_metrics_says_so_and_ends(self) -> None:
        """It would wait for its own socket for ever."""
        with server_process(WORKERS) as server:
            taken = socket_folder(server) / "metrics-0"
            taken.unlink()
            taken.mkdir()
            os.kill(process_of(server, "HTTP worker 0"), signal.SIGKILL)
            server.wait_for_line("HTTP worker 0 cannot give its metrics: ")
            server.wait_for_line("ready on")
            assert [score(server.url).status_code for _ in range(8)] == [200] * 8
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        assert not any("does not end" in line for line in server.log)

    def test_sockets_that_somebody_removes(self) -> None:
        """What is connected stays so; no other process could reach it, so the next death is the last."""
        with server_process(WORKERS, "--keep-seconds=0.1") as server:
            folder = socket_folder(server)
            shutil.rmtree(folder)
            server.wait_for_line(f"no process can take the place of one that ends: somebody has removed {folder}")
            assert [score(server.url).json()["scores"] for _ in range(8)] == [SCORES] * 8
            assert fetch("GET", f"{server.url}/metrics").status_code == 200
            os.kill(process_of(server, "HTTP worker 0"), signal.SIGKILL)
            assert server.wait() == ENGINE_FAILED_STATUS
        assert f"exiting with status 70: somebody has removed {folder}, " in server.log[-1]
        assert not any("Traceback" in line for line in server.log)

    def test_sockets_that_somebody_removes_while_the_model_loads(self, tmp_path: Path) -> None:
        with server_process(WORKERS, f"--load-until={tmp_path / 'there'}", wait=False) as server:
            server.wait_for_line("started HTTP worker 1")
            shutil.rmtree(socket_folder(server, "HTTP worker 0"))
            (tmp_path / "there").touch()
            assert server.wait() == 1
        assert server.log[-1].startswith("error: the engine process cannot make its socket: No such file or directory")
        assert not any("Traceback" in line for line in server.log)

    def test_three_failed_engines_end_the_server(self) -> None:
        with server_process(WORKERS, "--fault=raise") as server:
            for _ in range(2):
                assert error_of(score(server.url))[:3] == (503, "server_error", "engine_failed")
                server.wait_for_line("the engine process has ended with status 70: starting it again")
                server.wait_for_line("ready on")
            assert error_of(score(server.url))[2] == "engine_failed"
            assert server.wait() == ENGINE_FAILED_STATUS
        assert "exiting with status 70: the engine process has ended with status 70, 3 times in 60 s" in server.log[-1]

    def test_an_engine_that_cannot_be_loaded_again_ends_the_server(self, tmp_path: Path) -> None:
        weights = tmp_path / "weights"
        weights.touch()
        with server_process(WORKERS, f"--weights={weights}") as server:
            weights.unlink()
            os.kill(process_of(server, "the engine process"), signal.SIGKILL)
            assert server.wait() == ENGINE_FAILED_STATUS
        assert "the engine process has ended with status 1: the weights are gone, 3 times in 60 s" in server.log[-1]

    def test_one_that_cannot_be_started_again_ends_the_server(self, tmp_path: Path) -> None:
        """What runs is answered first."""
        let_go = tmp_path / "let-go"
        with (
            server_process(WORKERS, "--forks=3", f"--hold-until={let_go}") as server,
            ThreadPoolExecutor(16) as threads,
        ):
            try:
                answers = [threads.submit(score, server.url) for _ in range(16)]
                wait_for_requests(server, 16)
                os.kill(process_of(server, "HTTP worker 0"), signal.SIGKILL)
                server.wait_for_line("HTTP worker 0 has ended with signal SIGKILL: starting it again")
            finally:
                let_go.touch()
            assert server.wait() == ENGINE_FAILED_STATUS
            answered = [each.result() for each in answers if each.exception() is None]
        assert "exiting with status 70: HTTP worker 0 cannot be started: " in server.log[-1]
        assert [each.json()["scores"] for each in answered] == [SCORES] * len(answered)

    def test_an_engine_that_cannot_be_started_again_ends_the_server(self) -> None:
        with server_process(WORKERS, "--forks=3") as server:
            os.kill(process_of(server, "the engine process"), signal.SIGKILL)
            assert server.wait() == ENGINE_FAILED_STATUS
        assert "exiting with status 70: the engine process cannot be started: " in server.log[-1]

    def test_a_machine_without_room_for_the_processes(self) -> None:
        with server_process(WORKERS, "--forks=2", wait=False) as server:
            assert server.wait() == 1
        assert server.log[-1].startswith("error: HTTP worker 1 cannot be started: ")
        assert not any("Traceback" in line for line in server.log)

    def test_nothing_is_left_of_a_server_whose_supervisor_is_killed(self) -> None:
        with server_process(WORKERS) as server:
            children = psutil.Process(server.process.pid).children(recursive=True)
            folder = socket_folder(server)
            assert len(children) == 3
            server.signal(signal.SIGKILL)
            _, alive = psutil.wait_procs(children, SECONDS)
            assert alive == []
            assert not folder.exists()


class TestFrozen:
    def test_an_engine_that_does_not_answer_is_stalled_until_it_does(self) -> None:
        with server_process(WORKERS, "--silent-seconds=3") as server:  # without a watchdog nothing is killed
            engine = process_of(server, "the engine process")
            with frozen(engine):
                server.wait_for_line("the engine process has not answered for")
                until(lambda: {fetch("GET", f"{server.url}/health").status_code for _ in range(16)} == {503})
                assert error_of(fetch("GET", f"{server.url}/health"))[2] == "engine_stalled"
                assert error_of(score(server.url))[2] == "engine_stalled"
                assert metric(server, "engine_healthy") == 0
                assert fetch("GET", f"{server.url}/server_info").json()["status"] == "stalled"
            server.wait_for_line("the engine process answers again")
            until(lambda: {fetch("GET", f"{server.url}/health").status_code for _ in range(8)} == {200})
            assert score(server.url).json()["scores"] == SCORES
            assert process_of(server, "the engine process") == engine

    @pytest.mark.parametrize("name", ["the engine process", "HTTP worker 0"])
    def test_a_process_that_does_not_answer_for_long_is_replaced(self, name: str) -> None:
        with (
            server_process(WORKERS, "--silent-seconds=2", "--watchdog-timeout=4") as server,
            frozen(process_of(server, name)),
        ):
            server.wait_for_line(f"{name} has not answered for .* s: killed")
            server.wait_for_line(f"{name} has ended with signal SIGKILL: starting it again")
            server.wait_for_line("ready on")
            assert [score(server.url).json()["scores"] for _ in range(8)] == [SCORES] * 8

    @pytest.mark.parametrize("name", ["the engine process", "HTTP worker 0"])
    def test_it_does_not_hold_the_shutdown_up(self, name: str) -> None:
        """One limit holds for all processes together, however long a device may be busy at the end."""
        options = ("--shutdown-grace=0.1", "--exit-seconds=0.5", "--engine-seconds=600")
        with server_process(WORKERS, *options) as server, frozen(process_of(server, name)):
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        assert any(f"{name} does not end: killed" in line for line in server.log)


class TestCountedDeaths:
    def test_deaths_that_are_far_apart_are_forgiven(self) -> None:
        deaths = Deaths()
        assert [deaths.count(time * DEATH_SECONDS / 2, was_ready=True) for time in range(9)] == [None] * 9

    def test_three_in_a_minute_are_too_many(self) -> None:
        deaths = Deaths()
        assert [deaths.count(time, was_ready=True) for time in (0.0, 50.0, 59.9)] == [None, None, "3 times in 60 s"]

    def test_three_in_vain_are_too_many_however_long_they_take(self) -> None:
        deaths, long = Deaths(), 10 * DEATH_SECONDS
        ready = [True, False, False, True, False, False, False]
        found = [deaths.count(number * long, was_ready=each) for number, each in enumerate(ready)]
        assert found == [None] * 6 + ["3 times without becoming ready"]


def test_a_process_without_room_for_its_channel_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def socketpair() -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("prefixwise.server.workers.channel.socket.socketpair", socketpair)
    with pytest.raises(BackendError, match=r"HTTP worker 0 cannot be started: Too many open files; .*ulimit -n"):
        fork("HTTP worker 0", 0, lambda channel: 0)


@pytest.mark.filterwarnings("ignore:.*fork")  # of Python and JAX, where other tests have started threads
def test_a_process_without_room_for_its_threads_fails_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "log"

    def main(channel: Channel) -> NoReturn:
        logging.basicConfig(filename=file, format="%(message)s", force=True)
        raise RuntimeError("can't start new thread")  # as Python says it

    child = fork("HTTP worker 0", 0, main)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 1
    assert file.read_text() == f"HTTP worker 0 has failed: {NO_THREAD}\n"
    child.channel.close()


def test_the_files_of_a_server_look_new_to_what_cleans_its_folder(tmp_path: Path) -> None:
    files = [tmp_path, tmp_path / "engine-1", tmp_path / "metrics-0"]
    for file in files[1:]:
        file.touch()
    for file in files:
        os.utime(file, (0, 0))
    keep_socket_folder(tmp_path)
    assert all(min(file.stat().st_mtime, file.stat().st_atime) > 0 for file in files)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the whole file system is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(BackendError, match=r"No such file or directory; TMPDIR must be a folder .* can write to"):
        make_socket_folder()


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(BackendError, match="TMPDIR must be a path of at most"):
        make_socket_folder()
    assert list(long.iterdir()) == []
