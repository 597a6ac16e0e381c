"""What Ray costs: the script, on a real cluster of nodes on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster_throughput import CASES, Shape, parse_options, role_of, table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["ray::ServeReplica:prefixwise:front"], "front"),
        (["ray::ServeReplica:prefixwise:replica.answer"], "replica"),
        (["ray::ProxyActor"], "proxy"),
        (["python", "-m", "prefixwise", "serve", "--port", "0"], "server"),
        (["/lib/ray/raylet", "--node=x"], "rest of Ray"),
    ],
)
def test_processes_are_known_by_what_they_call_themselves(command: list[str], expected: str) -> None:
    assert role_of(command) == expected


def test_each_case_begins_with_the_server_that_the_others_are_held_against() -> None:
    assert all(case.shapes[0] == Shape(0) and Shape(0) not in case.shapes[1:] for case in CASES)


def test_a_phase_takes_time() -> None:
    with pytest.raises(SystemExit):
        parse_options(["--seconds", "0"])


def test_the_table_says_what_was_lost() -> None:
    row = {
        "case": "device",
        "who": "2 replicas, 1 fronts",
        "requests_per_second": 15.0,
        "items_per_second": 1500.0,
        "lost": 0.25,
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "alone_p50_ms": 3.0,
        "cores": {"front": 0.5, "rest of Ray": 0.001},
        "machine_load": 0.3,
    }
    cells = " ".join(table([row]).splitlines()[1].split())
    assert cells == "device 2 replicas, 1 fronts 15.0 1,500 25.0 % 1.0 2.0 3.0 front 0.50 0.3"


@pytest.mark.slow
def test_it_runs_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    output = tmp_path / "throughput.json"
    command = [sys.executable, "-m", "benchmarks.cluster_throughput", "--tiny", "--seconds", "2"]
    done = subprocess.run([*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(output.read_text(encoding="utf-8")) == result
    server, one, two = result["rows"]
    assert (server["lost"], one["replicas"], two["replicas"]) == (None, 1, 2)
    assert all(row["items_per_second"] > 0 and row["errors"] == {} for row in result["rows"])
    assert server["cores"].keys() == {"server", "client"}
    assert one["cores"].keys() >= {"client", "front", "proxy", "replica"}
