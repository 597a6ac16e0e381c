"""Servers on record: found when they run, here; left alone elsewhere; stopped when their agent is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixwise.bench.remote.on_target.server_records import (
    Process,
    ServerRecord,
    left_over,
    on_record,
    records_folder,
    stop_left,
)
from prefixwise.bench.remote.targets.base import TargetError

SLEEPER = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def recorded(process: subprocess.Popen[bytes]) -> Path:
    ServerRecord("/runs/one").begin(process.pid)
    (path,) = records_folder().glob("*.json")
    return path


def test_a_record_goes_with_its_server_and_not_before(sleeper: subprocess.Popen[bytes]) -> None:
    with on_record("/runs/one") as record:
        record.begin(sleeper.pid)
        assert [found.server.process_id for _, found in left_over()] == [sleeper.pid]
    assert len(left_over()) == 1  # the server runs on, and is to be found
    with on_record("/runs/one") as record:
        record.begin(sleeper.pid)
        sleeper.kill()
        sleeper.wait()
    assert not list(records_folder().glob("*.json"))


def test_one_whose_agent_is_gone_is_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    path = recorded(sleeper)
    edit(path, agent={"process_id": 1 << 22, "started": "never"})
    said: list[str] = []
    assert stop_left(said.append, take_over=False) == {"stopped": [sleeper.pid]}
    assert sleeper.wait(10) == -15
    assert "stopped a server of an earlier run" in said[0]
    assert not path.exists()


def test_one_whose_agent_runs_is_let_alone(sleeper: subprocess.Popen[bytes]) -> None:
    recorded(sleeper)
    with pytest.raises(TargetError, match=r"is still used by process \d+: --take-over stops it"):
        stop_left(lambda line: None, take_over=False)
    assert sleeper.poll() is None


def test_taking_over_ends_an_agent_that_leads_no_group(sleeper: subprocess.Popen[bytes]) -> None:
    """As where a shell stands before it."""
    path = recorded(sleeper)
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as agent:
        found = Process.of(agent.pid)
        assert found is not None
        edit(path, agent={"process_id": found.process_id, "started": found.started})
        stop_left(lambda line: None, take_over=True)
        assert agent.wait(10) == -15
    assert sleeper.wait(10) == -15


def test_another_machines_record_is_neither_used_nor_removed(sleeper: subprocess.Popen[bytes]) -> None:
    path = recorded(sleeper)
    edit(path, machine="elsewhere", agent={"process_id": 1 << 22, "started": "never"})
    assert stop_left(lambda line: None, take_over=True) == {"stopped": []}
    assert path.exists()
    assert sleeper.poll() is None


def test_an_id_that_is_used_again_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    path = recorded(sleeper)
    edit(path, server={"process_id": sleeper.pid, "started": "long ago"})
    assert left_over() == []
    assert sleeper.poll() is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"server": 3}'])
def test_half_a_record_is_removed(content: str) -> None:
    records_folder().mkdir(parents=True)
    (records_folder() / "1.json").write_text(content)
    assert left_over() == []
    assert not list(records_folder().glob("*.json"))


def test_one_that_does_not_listen_is_made_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixwise.bench.remote.on_target.server_records._GRACE_SECONDS", 0.2)
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = Process.of(process.pid)
        assert found is not None and found.stop()
        assert process.wait(10) == -9
