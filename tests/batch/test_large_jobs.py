"""Jobs of a real size as processes: memory that does not grow, and what `kill -9` costs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.batch.inputs import read_jsonl, rows, write_jsonl
from tests.cli.conftest import REAL_PROGRAM, run_process
from tests.cli.test_batch import LABELS, start_slow, wait_for_parts

pytestmark = pytest.mark.slow

MORE_THAN_NOISE = 24 << 20  # bytes; the larger input has 80 MB more


def arguments(path: Path, output: Path, *more: str) -> list[str]:
    return ["batch", "--input", str(path), "--output", str(output), *LABELS, *more]


def peak_bytes(command: Iterable[str]) -> int:
    """Of the process that runs it, by its own high-water mark: the one that `wait4` tells is our own at the start."""
    process, peak = subprocess.Popen([*command]), 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max(peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    assert process.returncode == 0
    return peak * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 20_000):
        path = write_jsonl(tmp_path / f"{count}.jsonl", rows(count, note="x" * 4096))
        output = tmp_path / f"{count}.out.jsonl"
        # A mode that needs no sum over the vocabulary, whose memory would hide what is looked for.
        command = arguments(path, output, "--backend", "fake", "--score-mode", "logit", "--quiet")
        peaks.append(peak_bytes([*REAL_PROGRAM, *command]))
        assert [row["line"] for row in read_jsonl(output)] == list(range(1, count + 1))
    assert peaks[1] - peaks[0] < MORE_THAN_NOISE


def test_a_job_killed_again_and_again_has_every_row_once(tmp_path: Path) -> None:
    path, output, whole = (
        write_jsonl(tmp_path / "in.jsonl", rows(600)),
        tmp_path / "out.jsonl",
        tmp_path / "whole.jsonl",
    )
    cut_short = arguments(path, output, "--backend", "fake", "--part-rows", "20")
    for count in (2, 7, 15):
        process = start_slow(*cut_short, "--resume")
        wait_for_parts(tmp_path / "out.jsonl.parts", count)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    assert run_process([*REAL_PROGRAM, *cut_short, "--resume"]).status == 0
    assert run_process([*REAL_PROGRAM, *arguments(path, whole, "--backend", "fake")]).status == 0
    assert output.read_bytes() == whole.read_bytes()
    assert len(read_jsonl(output)) == 600


def test_the_embedded_model_gives_the_same_bytes_after_kill_9(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = rows(300)
    path, output, whole = write_jsonl(tmp_path / "in.jsonl", bodies), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    cut_short = [*REAL_PROGRAM, *arguments(path, output, "--part-rows", "16", "--resume")]
    process = subprocess.Popen(cut_short, stderr=subprocess.DEVNULL)
    wait_for_parts(tmp_path / "out.jsonl.parts", 4)
    process.kill()
    process.wait()
    assert run_process(cut_short).status == 0
    assert run_process([*REAL_PROGRAM, *arguments(path, whole)]).status == 0
    assert output.read_bytes() == whole.read_bytes()
    assert [row["id"] for row in read_jsonl(output)] == [body["id"] for body in bodies]
