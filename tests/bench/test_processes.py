"""Servers of our own: ready when they are handed out, gone when the block is left, whatever ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from prefixwise.bench import processes
from prefixwise.bench.processes import ServerStartError, ended_by_signals, local_server, undisturbed
from prefixwise.bench.with_parent import PARENT_VARIABLE, command_with_parent, parent_environment

TIMEOUT = 60.0


WAITER = """
import signal, sys
from pathlib import Path
from prefixwise.bench.processes import local_server
with local_server(sys.argv[2:], Path(sys.argv[1])) as server:
    print(server.process_id, flush=True)
    signal.pause()
"""


def is_running(process_id: int) -> bool:
    return bool(psutil.pid_exists(process_id)) and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE


def wait_for(what: Callable[[], int | None]) -> int:
    """What it gives, as soon as it gives something."""
    tick = threading.Event()
    for _ in range(int(TIMEOUT / 0.01)):
        if (found := what()) is not None:
            return found
        tick.wait(0.01)
    raise AssertionError("waited in vain")


def child_with(parent: int, flag: str) -> int:
    """The process of this parent that was started with the flag, as soon as there is one."""

    def find() -> int | None:
        for child in psutil.Process(parent).children():
            with suppress(psutil.Error):  # it ends just now
                if flag in child.cmdline():
                    return int(child.pid)
        return None

    return wait_for(find)


@pytest.fixture(scope="module")
def flags(checkpoint_of: Callable[[str], Path]) -> list[str]:
    """Without a model it is ready soonest."""
    return [f"--model-path={checkpoint_of('qwen3')}", "--device=cpu", "--backend=fake"]


def test_a_server_is_ready_in_the_block_and_gone_after_it(flags: list[str], tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    with local_server(flags, log) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert is_running(server.process_id)
        # Ctrl-C on a terminal goes to our group: the server is in another.
        assert os.getpgid(server.process_id) != os.getpgid(0)
    assert not is_running(server.process_id)
    assert server.log == log
    assert "SIGTERM: shutting down" in log.read_text()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-model")
    with (
        pytest.raises(ServerStartError, match=r"ended with status 1: .*no-such-model"),
        local_server([f"--model-path={missing}"], tmp_path / "log"),
    ):
        raise AssertionError("it cannot be ready")


@pytest.fixture
def never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon the server is."""
    monkeypatch.setattr(processes, "_READY", re.compile("(no such line)"))


@pytest.mark.usefixtures("never_ready")
def test_a_server_that_is_killed_before_it_is_ready_is_told_apart(flags: list[str], tmp_path: Path) -> None:
    name = f"--served-model-name={tmp_path.name}"
    killer = threading.Thread(target=lambda: os.kill(child_with(os.getpid(), name), signal.SIGKILL))
    killer.start()
    with (
        pytest.raises(ServerStartError, match=r"was ended by SIGKILL \(probably out of memory\)"),
        local_server([*flags, name], tmp_path / "log"),
    ):
        raise AssertionError("it cannot be ready")
    killer.join()


@pytest.mark.usefixtures("never_ready")
def test_the_poll_times_out_and_leaves_no_server(flags: list[str], tmp_path: Path) -> None:
    name = f"--served-model-name={tmp_path.name}"
    with (
        pytest.raises(ServerStartError, match=r"was not ready after 0.2 s"),
        local_server([*flags, name], tmp_path / "log", start_timeout_sec=0.2),
    ):
        raise AssertionError("it cannot be ready")
    assert not [child for child in psutil.Process().children() if name in child.cmdline()]


@pytest.mark.parametrize("moment", ["ready on", "listening on"])
def test_ctrl_c_stops_the_server(flags: list[str], tmp_path: Path, moment: str) -> None:
    """In the block, and while we wait for it: a server listens some time before it is ready."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", WAITER, str(log), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiter:
        assert waiter.stdout is not None and waiter.stderr is not None
        started = child_with(waiter.pid, "serve")
        if moment == "ready on":
            assert int(waiter.stdout.readline()) == started
        else:
            wait_for(lambda: 1 if moment in log.read_text() else None)
        waiter.send_signal(signal.SIGINT)
        assert waiter.wait(TIMEOUT) != 0
        assert "KeyboardInterrupt" in waiter.stderr.read()
    assert not is_running(started)


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP is not ignored, as it is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exit_with_the_usual_status_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as exited, ended_by_signals():
        os.kill(os.getpid(), number)
        signal.pause()
    assert exited.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_waits_for_the_end_of_the_block() -> None:
    done: list[str] = []
    with pytest.raises(SystemExit) as exited, ended_by_signals():
        with undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("all of the block")
        done.append("nothing after it")
    assert (exited.value.code, done) == (143, ["all of the block"])


def test_ctrl_c_waits_too_and_a_child_is_not_deaf() -> None:
    with pytest.raises(KeyboardInterrupt), undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.terminate()
    assert child.wait(20) == -signal.SIGTERM


PARENT = """
import os, subprocess, sys
from prefixwise.bench.with_parent import command_with_parent, parent_environment
child = subprocess.Popen(
    command_with_parent(["serve", "--port=0", f"--model-path={sys.argv[1]}", "--log-level=info"]),
    stdin=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    env={**os.environ, **parent_environment()},
    start_new_session=True,
)
print(child.pid, flush=True)
child.stderr.readline()
print("it has begun", flush=True)
child.wait()
"""


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = command_with_parent(arguments)
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_it_is_prefixwise() -> None:
    ran = run("--version", environment=parent_environment())
    assert (ran.returncode, ran.stdout.split()[0]) == (0, "prefixwise")


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    assert run("--version", environment={PARENT_VARIABLE: "1"}).returncode == 143


def test_a_killed_parent_leaves_no_child() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, "embedded"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.stdout.readline()
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: None if is_running(child) else 1)
