"""One run at a time: the machine is somebody's while an agent works for him, and some seconds more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixwise.bench.remote.agent_client import RemoteAgent
from prefixwise.bench.remote.on_target import run_lock
from prefixwise.bench.remote.spec import ClientMatrixSpec, SweepSpec
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.contract.errors import ArtifactError

NOBODY = {"process_id": 1 << 22, "started": "never"}


@pytest.fixture
def other_agent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the lock for the run `theirs`."""
    take = "from prefixwise.bench.remote.on_target.run_lock import take; take('theirs', '/runs/theirs')"
    script = f"{take}; print(flush=True)"
    command = [sys.executable, "-c", f"{script}; import time; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def edit(**changes: object) -> None:
    path = run_lock.lock_file()
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def owner() -> str | None:
    found = run_lock.holder()
    return None if found is None else found.token


def test_a_second_run_is_refused_and_told_whose_the_machine_is(other_agent: subprocess.Popen[bytes]) -> None:
    with pytest.raises(
        TargetError, match=rf"/runs/theirs, started 2.*Z by theirs, process {other_agent.pid} on this machine .*--take-"
    ):
        run_lock.take("ours", "/runs/ours")
    assert owner() == "theirs"


def test_taking_over_ends_the_agent_that_has_it(other_agent: subprocess.Popen[bytes]) -> None:
    run_lock.take("ours", "/runs/ours", take_over=True)
    assert other_agent.wait(10) == -15
    assert owner() == "ours"
    assert run_lock.release("theirs") == {"released": False}
    with pytest.raises(TargetError, match="another run is active"):
        run_lock.take("theirs", "/runs/theirs")


def test_between_two_calls_it_stays_the_runs_and_then_lapses() -> None:
    run_lock.take("theirs", "/runs/theirs")
    edit(agent=NOBODY)
    with pytest.raises(TargetError, match="another run is active"):
        run_lock.take("ours", "/runs/ours")
    for seen in (0.0, 1e12):  # long ago, and of a clock that was set back
        run_lock.release("ours")
        run_lock.take("theirs", "/runs/theirs")
        edit(agent=NOBODY, seen=seen)
        run_lock.take("ours", "/runs/ours")
        assert owner() == "ours"


@pytest.mark.parametrize("content", ["", "{}", '{"token": 1, "agent": {}}'])
def test_half_a_record_holds_nothing(content: str) -> None:
    run_lock.lock_file().parent.mkdir(parents=True, exist_ok=True)
    run_lock.lock_file().write_text(content)
    run_lock.take("ours", "/runs/ours")
    assert owner() == "ours"


def test_a_machine_that_shares_the_home_is_another(other_agent: subprocess.Popen[bytes]) -> None:
    edit(machine="elsewhere")
    run_lock.take("ours", "/runs/ours")
    assert owner() == "ours"


def test_it_is_kept_after_a_call_and_freed_by_what_ends_the_agent() -> None:
    spec = ClientMatrixSpec("/runs/ours", "jax", (), (), run="ours")
    with run_lock.held(spec, "/runs/ours"):
        edit(seen=0.0)
    found = run_lock.holder()
    assert found is not None
    assert found.seen > 0
    with pytest.raises(SystemExit), run_lock.held(spec, "/runs/ours"):
        raise SystemExit(143)
    assert owner() is None
    with run_lock.held(ClientMatrixSpec("/runs/ours", "jax", (), ()), "/runs/ours"):
        assert owner() is not None
    assert owner() is None


def test_a_call_of_another_run_is_refused_before_it_makes_a_folder(
    other_agent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    agent, spec = RemoteAgent.on(LocalTarget()), SweepSpec(folder=f"{tmp_path}/run", model="embedded", run="ours")
    with pytest.raises(TargetError, match="another run is active"):
        agent.call("begin", "--spec", spec.to_line())
    assert agent.call("release", "--token", "theirs") == {"released": True}


def test_a_spec_of_another_version_names_the_remedy() -> None:
    line = SweepSpec(prefixwise="0.0.1").to_line()
    with pytest.raises(ArtifactError, match=r"expected prefixwise 0.0.1, got .* here \(run prefixwise ops install"):
        SweepSpec.from_line(line)
