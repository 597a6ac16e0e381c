"""`prefixwise batch --cluster` over three hosts, one of which dies on the way: the bytes of a single host's run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from tests.batch.inputs import read_jsonl, rows, write_jsonl
from tests.cli.conftest import run_process
from tests.cli.test_batch import FAKE
from tests.hosts.network import hosts
from tests.hosts.ray_hosts import PREFIXWISE, ray_environment, start_ray, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_ROWS, PART_ROWS = 6_000, 100
ENVIRONMENT = ray_environment(step_seconds=0.05)  # so that there is time to end a host


def test_a_host_that_dies_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", rows(NUM_ROWS, num_queries=100))
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"

    def num_parts() -> int:
        return len(list((tmp_path / "out.jsonl.parts").glob("part-*.jsonl")))

    def wait_for_parts(number: int) -> None:
        wait_until(lambda: num_parts() >= number, f"{number} parts")

    with hosts(3) as members:
        head, first, second = members
        address = start_ray(members, ENVIRONMENT, cpus=(0, 1, 1))  # a worker on each of the others
        job = ("batch", "--input", str(path), "--output", str(output), *FAKE)
        on_cluster = (*job, "--cluster", address, "--part-rows", str(PART_ROWS))
        driver = head.start(*PREFIXWISE, *on_cluster, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        wait_for_parts(4)
        first.cut()
        wait_for_parts(8)
        first.join()
        wait_for_parts(12)
        second.die()
        assert num_parts() < NUM_ROWS / PART_ROWS, "it was done already"
        _, said = driver.entry.communicate(timeout=500)
        assert driver.entry.returncode == 0, said
    alone = run_process([*PREFIXWISE, "batch", "--input", str(path), "--output", str(whole), *FAKE])
    assert alone.status == 0, alone.err
    assert output.read_bytes() == whole.read_bytes()
    assert [row["line"] for row in read_jsonl(output)] == list(range(1, NUM_ROWS + 1))
