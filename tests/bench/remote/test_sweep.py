"""Sweeps on real targets: this machine, and this machine over ssh.

Servers of the fake backend are ready soonest; one sweep is with a small model on PyTorch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.ops import OpsMatrix, OpsRow
from prefixwise.bench.remote.agent_client import RemoteAgent
from prefixwise.bench.remote.collect import collect, list_runs
from prefixwise.bench.remote.on_target.server_records import records_folder
from prefixwise.bench.remote.spec import SweepSpec
from prefixwise.bench.remote.sweep import SweepResult, Watcher, run_sweep
from prefixwise.bench.remote.targets.base import ConnectionLostError, TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.ssh import SshTarget
from prefixwise.bench.run.check import check_file
from prefixwise.contract.errors import ArtifactError
from tests.bench.remote.ssh_server import PYTHON, SshServer

ENDLESS = 1_000_000  # runs: something else ends it
LOCAL = RemoteAgent.on(LocalTarget())


def over_ssh(ssh: SshServer) -> RemoteAgent:
    return RemoteAgent.on(SshTarget.parse(ssh.address.removeprefix("ssh://")), PYTHON)


@pytest.fixture
def spec(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> SweepSpec:
    return SweepSpec(
        folder=str(tmp_path / "artifacts" / "dense-matrix-1"),
        chunk_sizes=(2, 4),
        model=str(checkpoint_of("qwen3")),
        backend="fake",
        dtype="float32",
        query_tokens=24,
        num_items=6,
        item_tokens=3,
        timed_runs=2,
        timeout_sec=60,
        start_timeout_sec=60,
        server_flags=("--device=cpu",),
    )


def sweep(
    agent: RemoteAgent, spec: SweepSpec, on_line: Callable[[str], None] = lambda line: None, *, take_over: bool = False
) -> SweepResult:
    return run_sweep(agent, spec, Watcher(lambda title: None, on_line), take_over=take_over)


def servers_of(spec: SweepSpec) -> list[int]:
    """All that serve this test's model, whoever has started them."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "serve" in words and spec.model in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def wait_until(what: Callable[[], object], timeout: float = 30.0) -> None:
    tick, until = threading.Event(), time.monotonic() + timeout
    while not what():
        assert time.monotonic() < until, "waited in vain"
        tick.wait(0.02)


def problems_in(folder: Path) -> list[str]:
    return [str(each) for path in sorted(folder.glob("*.json")) for each in check_file(path).errors]


@pytest.mark.parametrize(
    ("place", "backend", "reported", "sizes"), [("local", "torch", "pytorch", (4,)), ("ssh", "fake", "fake", (2, 4))]
)
def test_chunk_sizes_leave_valid_artifacts_and_no_server(
    place: str,
    backend: str,
    reported: str,
    sizes: tuple[int, ...],
    spec: SweepSpec,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    agent = LOCAL if place == "local" else over_ssh(request.getfixturevalue("our_ssh"))
    spec = replace(spec, backend=backend, chunk_sizes=sizes)
    lines: list[str] = []
    result = sweep(agent, spec, lines.append)
    assert [row.status for row in result.rows] == ["ok"] * len(sizes), result.rows
    assert "chunk size 4: starting the server" in lines  # they come while it runs
    assert not servers_of(spec)

    assert [run.name for run in list_runs(agent, str(tmp_path / "artifacts"))] == ["dense-matrix-1"]
    (fetched,) = collect(agent, str(tmp_path / "artifacts"), ["dense-matrix-1"], tmp_path / "here", lines.append)
    names = {path.name for path in fetched.iterdir()}
    chunks = {f"chunk_{size}.{kind}" for size in spec.chunk_sizes for kind in ("json", "log")}
    assert names == chunks | {"run_metadata.json", "matrix_results.json", "server.log", "workload.json"}
    assert problems_in(fetched) == []
    matrix = read_artifact(fetched / "matrix_results.json", OpsMatrix)
    assert (matrix.backend, matrix.workload_ref) == (reported, "canonical-24-6-3")
    assert matrix.results == result.rows
    assert all(row.memory_peak_mb and row.memory_peak_mb > 10 for row in matrix.results)
    assert (fetched / "server.log").read_text().count("SIGTERM: shutting down") == len(sizes)
    assert not list(records_folder().glob("*.json"))


def test_a_second_sweep_goes_on_from_the_rows_that_are_good(spec: SweepSpec) -> None:
    sweep(LOCAL, replace(spec, chunk_sizes=(2,)))
    path = Path(spec.folder) / "chunk_2.json"
    before = path.read_bytes()
    (path.parent / "chunk_4.json").write_text(json.dumps({**json.loads(before), "chunk_size": 4, "status": "failed"}))
    steps: list[str] = []
    run_sweep(LOCAL, replace(spec, chunk_sizes=(2, 4)), Watcher(steps.append, lambda line: None))
    assert steps == ["chunk size 2: already measured", "chunk size 4"]
    assert path.read_bytes() == before
    with pytest.raises(TargetError, match="contains another sweep: num_items is 6 there, 7 here"):
        sweep(LOCAL, replace(spec, num_items=7))


def test_a_key_of_the_machine_is_not_asked_of_the_run(spec: SweepSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXWISE_API_KEY", "secret")
    (row,) = sweep(LOCAL, replace(spec, chunk_sizes=(2,))).rows
    assert (row.status, row.error) == ("ok", None)


def test_a_server_that_the_system_kills_is_a_row_and_the_sweep_goes_on(spec: SweepSpec) -> None:
    """As it does where memory runs out: here while it loads."""

    def kill(line: str) -> None:
        if line.startswith("chunk size 2: starting"):
            wait_until(lambda: servers_of(spec))
            os.kill(servers_of(spec)[0], signal.SIGKILL)

    result = sweep(LOCAL, spec, kill)
    assert [row.status for row in result.rows] == ["failed", "ok"]
    assert "the server was ended by SIGKILL (probably out of memory)" in (result.rows[0].error or "")
    assert problems_in(Path(spec.folder)) == []
    matrix = read_artifact(Path(spec.folder) / "matrix_results.json", OpsMatrix)
    assert (matrix.summary.total_configs_tested, matrix.summary.successful_configs) == (2, 1)


def test_a_server_that_is_killed_while_it_is_measured_is_a_row_that_says_so(spec: SweepSpec) -> None:
    def kill(line: str) -> None:
        if line.startswith("warm-up"):
            os.kill(servers_of(spec)[0], signal.SIGKILL)

    (row,) = sweep(LOCAL, replace(spec, chunk_sizes=(4,), timed_runs=ENDLESS), kill).rows
    assert (row.status, row.failure_reason) == ("failed", "http_error")
    assert row.error == "the server was ended by SIGKILL (probably out of memory)"


def test_a_server_that_does_not_start_is_a_row(spec: SweepSpec) -> None:
    result = sweep(LOCAL, replace(spec, chunk_sizes=(2,), server_flags=("--no-such-flag",)))
    assert not result.succeeded
    assert "the server ended with status 2" in (result.rows[0].error or "")
    assert result.rows[0].failure_reason == "start"


def test_a_port_that_is_taken_ends_it_before_a_server_starts(spec: SweepSpec) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TargetError, match=f"port {port} is taken"):
            sweep(LOCAL, replace(spec, port=port))
    assert not Path(spec.folder).exists()


def test_a_connection_that_is_cut_ends_the_server_and_a_second_run_goes_on(spec: SweepSpec, our_ssh: SshServer) -> None:
    agent = over_ssh(our_ssh)

    def cut(line: str) -> None:
        if line.startswith("chunk size 4: starting"):
            wait_until(lambda: servers_of(spec))
            our_ssh.cut()

    with pytest.raises(ConnectionLostError, match="the connection was lost"):
        sweep(agent, spec, cut)
    wait_until(lambda: not servers_of(spec))  # the agent there has noticed
    assert read_artifact(Path(spec.folder) / "chunk_2.json", OpsRow).status == "ok"
    steps: list[str] = []
    result = run_sweep(agent, spec, Watcher(steps.append, lambda line: None))
    assert steps == ["chunk size 2: already measured", "chunk size 4"]
    assert [row.status for row in result.rows] == ["ok"] * 2


def test_an_agent_that_is_killed_leaves_no_server_and_the_next_run_goes_on(spec: SweepSpec) -> None:
    def kill_agent(line: str) -> None:
        if line.startswith("chunk size 2: starting"):
            wait_until(lambda: servers_of(spec))
            psutil.Process(servers_of(spec)[0]).parent().kill()

    with pytest.raises(TargetError, match="it was ended by SIGKILL"):
        sweep(LOCAL, replace(spec, chunk_sizes=(2,)), kill_agent)
    wait_until(lambda: not servers_of(spec))
    assert sweep(LOCAL, replace(spec, chunk_sizes=(2,)), take_over=True).succeeded


def test_a_run_that_is_under_way_is_not_disturbed_unless_it_is_asked_for(spec: SweepSpec) -> None:
    seen: list[str] = []

    def disturb(line: str) -> None:
        if line.startswith("chunk size 2: ready"):
            with pytest.raises(TargetError, match="is still used by process") as refused:
                LOCAL.call("clean")
            seen.append(str(refused.value))
            seen.append(str(LOCAL.call("clean", "--take-over", "yes")["stopped"]))

    with pytest.raises(TargetError):
        sweep(LOCAL, replace(spec, chunk_sizes=(2,), timed_runs=ENDLESS), disturb)
    assert len(seen) == 2
    assert "--take-over stops it" in seen[0]
    assert not servers_of(spec)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_run_here_ends_the_server_there(
    spec: SweepSpec, number: signal.Signals, tmp_path: Path
) -> None:
    flags = [f"--model={spec.model}", "--backend=fake", "--query-tokens=8", "--num-items=2", "--item-tokens=2"]
    command = [sys.executable, "-m", "prefixwise", "ops", "smoke", *flags, f"--timed-runs={ENDLESS}"]
    command.append(f"--artifact-root={tmp_path}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        said = iter(run.stderr)
        assert any(b"starting the server" in line for line in said)
        wait_until(lambda: servers_of(spec))
        run.send_signal(number)
        for _ in said:
            pass
        run.wait(60)
    wait_until(lambda: not servers_of(spec))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here: that takes root, and a system that lets it")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_told_and_leaves_what_was_done(spec: SweepSpec, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "24m"):
        spec = replace(spec, folder=str(disk / "run"))
        assert sweep(LOCAL, replace(spec, chunk_sizes=(2,))).succeeded
        (disk / "filler").write_bytes(bytes(20_000_000))
        with pytest.raises(TargetError, match=r"no space left on device: \d.\d MB are free in .*, expected 16 MB"):
            sweep(LOCAL, spec)
        filler = os.open(disk / "more", os.O_CREAT | os.O_WRONLY)
        with pytest.raises(OSError, match="No space"):
            while True:
                os.write(filler, bytes(4096))
        os.close(filler)
        with pytest.raises(TargetError, match="no space left on device"):
            sweep(LOCAL, replace(spec, folder=str(disk / "other")))
        assert not (disk / "other").exists()
        assert not servers_of(spec)
        assert read_artifact(disk / "run" / "chunk_2.json", OpsRow).status == "ok"
        assert problems_in(disk / "run") == []


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(TargetError, match=r"local has no run 'two' in .*; existing runs: one"):
        collect(LOCAL, str(tmp_path), ["two"], tmp_path / "here", lambda name: None)
    with pytest.raises(ArtifactError, match="the name of a run must consist of letters"):
        collect(LOCAL, str(tmp_path), ["../one"], tmp_path / "here", lambda name: None)
