"""One model over two hosts: `prefixwise serve --nnodes 2 --tp-size 2` on both, with a CPU device of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from tests.checkpoints import add_tokenizer, make_hf_checkpoint
from tests.hosts.network import ROOT, Host, HostProcess, hosts
from tests.hosts.ray_hosts import PREFIXWISE, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

PORT = 8000
ONE_DEVICE = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
TWO_DEVICES = {**ONE_DEVICE, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
SCORES = (sys.executable, "-m", "tests.hosts.scores")
ENGINE = ("--backend", "jax", "--device", "cpu", "--tp-size", "2", "--token-budget", "512")
ENGINE_FAILED_STATUS = 70
TIMEOUT = 400.0  # seconds: programs are compiled


class Ranks:
    """Both processes, and what they have said."""

    def __init__(self, members: list[Host], model: Model, logs: Path, *flags: str) -> None:
        self.members = members
        self.url = f"http://{members[0].address}:{PORT}"
        self._logs = [logs / "rank0.log", logs / "rank1.log"]
        engine = ("--model-path", str(model.folder), "--compilation-cache-dir", str(model.programs), *ENGINE, *flags)
        nodes = ("--nnodes", "2", "--dist-init-addr", f"{members[0].address}:5000")
        where = ("--host", members[0].address, "--port", str(PORT))
        self.processes: list[HostProcess] = []
        for rank, host in enumerate(members):
            command = (*PREFIXWISE, "serve", *engine, *nodes, "--node-rank", str(rank), *(() if rank else where))
            with self._logs[rank].open("w") as log:
                self.processes.append(host.start(*command, env=ONE_DEVICE, stdout=log, stderr=log))

    def said(self, rank: int) -> str:
        return self._logs[rank].read_text()

    def wait_until_ready(self) -> None:
        wait_until(lambda: "ready on" in self.said(0) or self._has_ended(), "the server is ready", timeout=TIMEOUT)
        assert not self._has_ended(), self.said(0) + self.said(1)

    def _has_ended(self) -> bool:
        return any(process.entry.poll() is not None for process in self.processes)

    def scores(self) -> Any:
        return json.loads(self.members[0].run(*SCORES, self.url, timeout=TIMEOUT))

    def start_scoring(self) -> HostProcess:
        quiet: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        return self.members[0].start(*SCORES, self.url, **quiet)


class Model(NamedTuple):
    """A checkpoint whose forwards have one size, and the programs that were compiled for it."""

    folder: Path
    programs: Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_hf_checkpoint(tmp_path_factory.mktemp("made") / "qwen3", "qwen3", max_position_embeddings=500)
    add_tokenizer(folder, bos=False)
    return Model(folder, tmp_path_factory.mktemp("programs"))


@contextmanager
def two_ranks(model: Model, logs: Path, warmup: str) -> Iterator[Ranks]:
    with hosts(2) as members:
        ranks = Ranks(members, model, logs, "--warmup", warmup)
        ranks.wait_until_ready()
        yield ranks


def scores_of_one_process(model: Model) -> Any:
    command = [*SCORES, *map(str, model)]
    environment = {**os.environ, **TWO_DEVICES}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_two_hosts_score_as_one_process_to_the_bit_and_end_together(model: Model, tmp_path: Path) -> None:
    """They warm up together. A cable that is out for ten seconds costs no score."""
    expected = scores_of_one_process(model)
    with two_ranks(model, tmp_path, "full") as ranks:
        assert ranks.scores() == expected
        scoring = ranks.start_scoring()  # with cached prefixes
        ranks.members[1].cut()
        time.sleep(10)
        ranks.members[1].join()
        found, _ = scoring.entry.communicate(timeout=TIMEOUT)
        assert json.loads(found) == expected
        assert [ranks.processes[0].end(), ranks.processes[1].entry.wait(TIMEOUT)] == [0, 0]
        assert "rank 0 has closed the model" in ranks.said(1)


@pytest.mark.parametrize("how", ["the process", "the host"])
def test_without_one_rank_the_other_ends_with_a_clear_message(model: Model, tmp_path: Path, how: str) -> None:
    with two_ranks(model, tmp_path, "none") as ranks:
        ranks.scores()
        if how == "the process":
            ranks.processes[1].send_signal(signal.SIGKILL)
        else:
            ranks.members[1].die()
            ranks.start_scoring()  # a forward that waits for the host
        assert ranks.processes[0].entry.wait(TIMEOUT) == ENGINE_FAILED_STATUS
        expected = f"the engine has failed: rank 1 ({ranks.members[1].address}) has ended, or cannot be reached"
        assert expected in ranks.said(0)


def test_without_rank_0_the_others_end_with_a_clear_message(model: Model, tmp_path: Path) -> None:
    with two_ranks(model, tmp_path, "none") as ranks:
        ranks.processes[0].send_signal(signal.SIGKILL)
        assert ranks.processes[1].entry.wait(TIMEOUT) == 1
        assert f"error: rank 0 ({ranks.members[0].address}) has ended, or cannot be reached" in ranks.said(1)
