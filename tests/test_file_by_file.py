"""The suite's own way to hand files out: nothing that runs, fails or cannot be imported may get lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "a/test_a.py": """
import os, pytest
@pytest.fixture(scope="session")
def process(): return os.getpid()
@pytest.mark.parametrize("n", [1, 2])
def test_passes(n, process): print("in process", process)
def test_fails(): assert 1 == 2
@pytest.mark.slow
def test_is_left_out(): pass
""",
    "a/test_b.py": "import pytest\npytestmark = pytest.mark.slow\ndef test_is_left_out(): pass",
    "c/test_c.py": "import no_such_module",
    "d/test_d.py": "def test_alone(): pass",
}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_file_is_collected_once_and_run_whole(num_processes: int, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"print('collected', {name!r}, file=open('collected', 'a'))\n{text}", "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow", "utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.file_by_file", "-p", "no:cacheprovider"]
    options = ["-n", str(num_processes), "--dist", "loadfile", "-m", "not slow", "-rA", "."]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run([*command, *options], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    told = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    assert sorted(told) == [
        ("ERROR", "c/test_c.py"),
        ("FAILED", "a/test_a.py::test_fails"),
        ("PASSED", "a/test_a.py::test_passes[1]"),
        ("PASSED", "a/test_a.py::test_passes[2]"),
        ("PASSED", "d/test_d.py::test_alone"),
    ]
    collected = (tmp_path / "collected").read_text("utf-8").splitlines()
    assert sorted(collected) == [f"collected {name}" for name in FILES]
    assert len(set(re.findall(r"in process \d+", done.stdout))) == 1  # one process has run the file
