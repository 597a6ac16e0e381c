"""Children that end when whoever started them ends, however that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from prefixwise.bench.with_parent import PARENT_VARIABLE, command_with_parent, parent_environment
from tests.bench.test_servers import is_running, wait_for

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
