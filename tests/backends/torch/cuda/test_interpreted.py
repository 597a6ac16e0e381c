"""The CUDA kernels in Triton's interpreter, for machines without a GPU.

Triton decides when it is imported whether kernels are interpreted, so their tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FILES = [str(Path(__file__).with_name(name)) for name in ("test_fused_elementwise.py", "test_paged.py")]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("chosen", ["not TestRunner", pytest.param("TestRunner", marks=pytest.mark.slow)])
def test_the_kernels_in_the_interpreter(chosen: str) -> None:
    """The runner takes minutes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", chosen, *FILES]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
