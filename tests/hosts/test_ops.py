"""`prefixwise ops` from one host to another, over ssh: a run, its artifacts, and a host that is gone."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.bench.remote.ssh_server import MISSING, write_files
from tests.hosts.network import Host, HostProcess, hosts
from tests.hosts.ray_hosts import PREFIXWISE, TIMEOUT, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

PORT = 22
WORKLOAD = ("--query-tokens=8", "--num-items=4", "--item-tokens=2", "--warmup-runs=0", "--timed-runs=1")


class Pair(NamedTuple):
    """Where commands are typed, and where they run."""

    here: Host
    there: Host
    folder: Path
    root: Path  # of runs, there

    def start(self, *args: str) -> HostProcess:
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PREFIXWISE_HOME": str(self.folder / "home"),
            "PREFIXWISE_TARGET": f"ssh://{getpass.getuser()}@host2",
        }
        verb, *others = args
        command = (*PREFIXWISE, "ops", verb, "--artifact-root", str(self.root), *others)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.here.start(*command, env=environment, **pipes)

    def run(self, *args: str) -> tuple[int, str, str]:
        process = self.start(*args).entry
        out, err = process.communicate(timeout=TIMEOUT)
        return process.returncode, out, err


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    if MISSING is not None:
        pytest.skip(f"{MISSING} is not installed: apt-get install openssh-server openssh-client")
    if os.geteuid() != 0:
        pytest.skip("sshd needs root: it changes users")
    with hosts(2) as (here, there):
        command = write_files(tmp_path / "ssh", there.address, PORT)
        with (tmp_path / "sshd.log").open("w") as log:
            there.start(*command, stderr=log)
        pair = Pair(here, there, tmp_path / "ssh", tmp_path / "runs")
        wait_until(lambda: "Server listening" in (tmp_path / "sshd.log").read_text(), "sshd listens")
        yield pair


def test_a_run_on_another_host_survives_ten_seconds_without_a_cable(
    pair: Pair, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    python = ("--python", sys.executable)
    status, out, err = pair.run("doctor", *python, "--backend=torch", "--min-free-gb=0")
    assert status == 0, err
    assert json.loads(out)["target"].endswith("@host2")
    model = ("--model", str(checkpoint_of("qwen3")), "--backend=torch", "--dtype=float32", "--server-flag=--device=cpu")
    sweep = pair.start("matrix", *python, *model, "--chunk-sizes=2,4", *WORKLOAD, "--artifact-subdir=one").entry
    wait_until(lambda: any(pair.root.rglob("server.log")), "the server starts there")
    pair.there.cut()
    with suppress(subprocess.TimeoutExpired):  # it waits for the other host
        sweep.wait(10)
    pair.there.join()
    out, err = sweep.communicate(timeout=TIMEOUT)
    assert sweep.returncode == 0, err
    assert json.loads(out)["target"].endswith("@host2")
    fetched = tmp_path / "fetched"
    status, out, err = pair.run("collect", *python, "--all", "--destination", str(fetched))
    assert status == 0, err
    assert [path.parent.name for path in fetched.rglob("matrix_results.json")] == ["one"]


def test_a_host_that_is_gone_is_one_clear_line(pair: Pair) -> None:
    pair.there.die()
    status, out, err = pair.run("collect", "--list")
    assert (status, out) == (1, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "host2 cannot be reached, or the connection was lost: ssh: connect to host host2" in line
