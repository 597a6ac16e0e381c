"""The same job in one process and on a cluster: the same bytes, whoever is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefixwise.backends.load import FAKE_STEP_VARIABLE
from prefixwise.batch.parts import Part
from prefixwise.cluster.batch_job import WorkerOptions
from prefixwise.contract.errors import BatchError
from tests.batch.inputs import read_jsonl, rows, write_jsonl
from tests.cli.conftest import REAL_PROGRAM, run_process
from tests.cli.test_batch import BAD, FAKE, LABELS, wait_for_parts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="starts Ray")]
STEP_SECONDS = "0.02"  # of the fake model on the workers, so that there is time to kill them
_SMALL = {"object_store_memory": 100 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster_address() -> Iterator[str]:
    """Two nodes with room for one worker each, and a head without any."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAKE_STEP_VARIABLE, STEP_SECONDS)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_SMALL})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, **_SMALL)
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()


def worker_processes() -> list[psutil.Process]:
    """Workers of this process's own cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::MapWorker"):
                found.append(process)
        except psutil.Error:  # it is gone
            continue
    return found


def kill_a_worker() -> int:
    """Which one it was."""
    worker = worker_processes()[0]
    worker.kill()
    worker.wait(30)
    return int(worker.pid)


def test_a_job_of_which_workers_and_the_driver_are_killed(tmp_path: Path, cluster_address: str) -> None:
    """20,000 rows on the fake model."""
    bodies = rows(20_000, num_queries=500)
    bodies[1234] = BAD
    path, output, whole = write_jsonl(tmp_path / "in.jsonl", bodies), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    on_cluster = [*REAL_PROGRAM, "batch", "--input", str(path), "--output", str(output), *FAKE, "--resume"]
    on_cluster += ["--cluster", cluster_address, "--part-rows", "500"]
    parts = tmp_path / "out.jsonl.parts"
    driver = subprocess.Popen(on_cluster, stderr=subprocess.PIPE)
    wait_for_parts(parts, 3)
    killed = kill_a_worker()
    wait_for_parts(parts, 10)
    driver.kill()
    driver.communicate()
    num_kept = len(list(parts.glob("part-*.jsonl")))
    assert 10 <= num_kept < 40
    assert killed not in [worker.pid for worker in worker_processes()]

    ran = run_process(on_cluster)
    assert ran.status == 0, ran.err
    assert "resuming: " in ran.err
    assert run_process([*REAL_PROGRAM, "batch", "--input", str(path), "--output", str(whole), *FAKE]).status == 0
    for suffix in ("", ".errors.jsonl"):
        assert Path(f"{output}{suffix}").read_bytes() == Path(f"{whole}{suffix}").read_bytes()
    assert [row["line"] for row in read_jsonl(output)] == [line for line in range(1, 20_001) if line != 1235]


def test_the_embedded_model_on_workers_gives_the_same_bytes(tmp_path: Path, cluster_address: str) -> None:
    path, output, whole = (
        write_jsonl(tmp_path / "in.jsonl", rows(300)),
        tmp_path / "out.jsonl",
        tmp_path / "whole.jsonl",
    )
    on_cluster = [*REAL_PROGRAM, "batch", "--input", str(path), "--output", str(output), *LABELS, "--part-rows", "16"]
    driver = subprocess.Popen([*on_cluster, "--cluster", cluster_address], stderr=subprocess.PIPE)
    wait_for_parts(tmp_path / "out.jsonl.parts", 2)
    kill_a_worker()
    _, said = driver.communicate(timeout=300)
    assert driver.returncode == 0, said
    assert run_process([*REAL_PROGRAM, "batch", "--input", str(path), "--output", str(whole), *LABELS]).status == 0
    assert output.read_bytes() == whole.read_bytes()
    assert len(read_jsonl(output)) == 300


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_as_in_one_process(
    tmp_path: Path, cluster_address: str, number: signal.Signals, status: int
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", rows(2_000))
    command = [*REAL_PROGRAM, "batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *FAKE]
    driver = subprocess.Popen(
        [*command, "--cluster", cluster_address, "--part-rows", "20"], stderr=subprocess.PIPE, text=True
    )
    wait_for_parts(tmp_path / "out.jsonl.parts", 2)
    driver.send_signal(number)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == status, said[-3000:]
    assert said.endswith("run the same command with --resume to continue\n")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--model", "/no/such/model"), "error: a worker failed: no model at '/no/such/model'"),
        (("--worker-gpus", "1"), "error: a worker needs 1 GPU, and no node has that: they have 1 CPU\n"),
    ],
)
def test_what_no_worker_can_do_is_one_clear_line(
    tmp_path: Path, cluster_address: str, extra: tuple[str, ...], words: str
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", rows(3))
    command = [*REAL_PROGRAM, "batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *LABELS]
    ran = run_process([*command, "--cluster", cluster_address, *extra])
    assert ran.status == 1
    (line,) = [line for line in ran.err.splitlines(keepends=True) if line.startswith("error: ")]
    assert words in line
    assert "Traceback" not in ran.err + ran.out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own options
def test_workers_that_die_each_time_end_the_job(cluster_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixwise.cluster import batch_job

    monkeypatch.setattr(batch_job, "_RESTARTS", {"max_restarts": 2, "max_task_retries": 1})
    dies: Any = partial(os._exit, 1)  # as it would of a model that is too large
    part = Part(index=0, file=0, start=0, stop=1, first_line=1, num_rows=1)
    task: Any = None
    with pytest.raises(BatchError, match="workers died again and again"):
        list(batch_job.score_on_cluster([part], task, dies, WorkerOptions(cluster_address)))


def test_no_cluster_at_an_address_is_one_clear_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path = write_jsonl(tmp_path / "in.jsonl", rows(3))
    command = [*REAL_PROGRAM, "batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *FAKE]
    ran = run_process([*command, "--cluster", "127.0.0.1:1"])
    assert ran.status == 1
    assert "error: no Ray cluster answers at 127.0.0.1:1" in ran.err
