"""Two processes with four devices each, joined by `jax.distributed`: one model over all eight."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.backends.jax.scoring_process import all_scores

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(("dp_size", "tp_size", "warmup"), [(1, 8, "none"), (2, 4, "full")])
def test_two_processes_score_as_one(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, dp_size: int, tp_size: int, warmup: str
) -> None:
    folder = str(checkpoint_of("qwen3"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    program = [sys.executable, "-m", "tests.backends.jax.scoring_process"]
    command = [*program, folder, str(dp_size), str(tp_size), warmup]
    outs = [tmp_path / "0", tmp_path / "1"]
    processes = [
        subprocess.Popen([*command, str(out)], cwd=ROOT, env={**environment, "JAX_PROCESS_ID": str(number)})
        for number, out in enumerate(outs)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    expected = np.array(all_scores(folder))
    for out in outs:
        assert np.abs(np.array(json.loads(out.read_text())) - expected).max() <= 1e-5
