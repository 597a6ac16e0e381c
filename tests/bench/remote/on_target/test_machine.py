from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.remote.on_target import machine
from prefixwise.bench.remote.targets.base import TargetError


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TargetError, match=f"port {port} is taken"):
            machine.check_port(port)
    machine.check_port(port)
    machine.check_port(0)


@pytest.mark.parametrize(
    ("model", "state", "words"),
    [
        ("embedded", "here", "its own tokenizer"),
        ("Qwen/Qwen3-0.6B", "missing", "not in the hub cache, and HF_HUB_OFFLINE is set"),
        ("nobody/knows-it", "missing", "not on this machine"),
        ("/no/such/folder", "missing", "not on this machine"),
    ],
)
def test_a_model_is_here_or_missing(
    model: str, state: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found, note = machine.model_facts(model)
    assert found == state and words in note


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (None, "comes", "the first server downloads it"),
        (OSError("Name or service not known"), "missing", "the hub refuses it: Name or service not known"),
    ],
)
def test_a_model_of_the_hub_comes_where_the_hub_gives_it(
    error: OSError | None, state: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def model_info(api: object, model: str, revision: str | None, timeout: float) -> None:
        assert (model, revision) == ("Qwen/Qwen3-0.6B", "v1")
        if error is not None:
            raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    found, note = machine.model_facts("Qwen/Qwen3-0.6B@v1")
    assert found == state and words in note


def test_backends_name_their_devices_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = {
        "json": "print('TPU v6 lite'); print('TPU v6 lite')",
        "csv": "raise RuntimeError('the TPU is held by process 7')",
        "no_such_backend": "print('never')",
    }
    monkeypatch.setattr(machine, "_QUERIES", queries)
    devices, problems = machine.query_backends()
    assert devices == ["json: TPU v6 lite", "json: TPU v6 lite"]
    assert problems == {"csv": "RuntimeError: the TPU is held by process 7"}


def test_a_backend_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_QUERIES", {"json": "import time; time.sleep(600)"})
    monkeypatch.setattr(machine, "_QUERY_TIMEOUT_SECONDS", 0.1)
    assert machine.query_backends() == ([], {"json": "it did not name its devices within 0 s"})


def test_facts_say_what_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "query_backends", lambda: (["torch: cpu"], {}))
    facts = machine.facts(str(tmp_path / "a" / "b"), "", 0)
    assert facts["is_writable"] and facts["free_bytes"] > 0 and facts["port_free"]
    assert facts["model"] is None and facts["model_state"] is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert not machine.facts(str(tmp_path / "file" / "b"), "", 0)["is_writable"]


@pytest.mark.parametrize(
    ("info", "peak"),
    [
        ({}, None),
        ({"memory": {"peak_host_bytes": 5_000_000, "device": None}}, 5.0),
        ({"memory": {"peak_host_bytes": 1, "device": {"0": {"peak_bytes": 2e6}, "1": {"peak_bytes": 3e6}}}}, 5.0),
    ],
)
def test_the_peak_is_of_all_devices_else_of_the_host(info: dict[str, Any], peak: float | None) -> None:
    assert machine.peak_megabytes(info) == peak


def test_artifacts_have_their_own_name_for_torch() -> None:
    info = {"devices": {"backend": "torch", "device": "cuda:0 (NVIDIA H200)", "kind": "cuda"}}
    assert machine.backend_and_hardware(info)[0] == "pytorch"
    assert machine.backend_and_hardware({}) == (None, "unknown")


def test_the_end_of_a_child_is_told_in_words() -> None:
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert machine.end_of(running.pid) is None
    running.kill()
    assert _end(running) == "the server was ended by SIGKILL (probably out of memory)"
    assert _end(subprocess.Popen(["sh", "-c", "exit 3"])) == "the server ended with status 3"


def _end(process: subprocess.Popen[bytes]) -> str | None:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until it is over, and still to be asked about
    ending = machine.end_of(process.pid)
    process.wait()
    return ending
