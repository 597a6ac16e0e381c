"""What this machine has (Python, backends, devices, disk, ports, models), and what a server on it tells."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prefixwise._version import __version__
from prefixwise.bench.hardware import server_fact
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.token_facts import token_facts
from prefixwise.contract.errors import ModelLoadError

ModelState = Literal["here", "comes", "missing"]  # comes: the first server downloads it

# For the servers of a run, which are for it alone: an empty key is none, whatever this machine's own is.
NO_KEY = {"PREFIXWISE_API_KEY": ""}

_HUB_SECONDS = 15.0
_LEAST_FREE_BYTES = 16_000_000
_BACKENDS = {"torch": "pytorch"}  # what artifacts call them


def facts(folder: str, model: str, port: int) -> dict[str, Any]:
    """For `ops doctor`, and for a run that asks before it begins."""
    existing = _existing(Path(folder).expanduser())
    found, problems = ask_backends()
    model_state, model_words = model_facts(model) if model else (None, None)
    return {
        "prefixwise": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: importlib.util.find_spec(name) is not None for name in ("jax", "torch", "httpx", "uvicorn")},
        "devices": found,
        "device_problems": problems,
        "free_bytes": shutil.disk_usage(existing).free,
        "is_writable": _can_write(existing),
        "port_free": port_is_free(port),
        "model_state": model_state,
        "model": None if model_state == "here" else model_words,  # what there is to say of it
    }


def _existing(place: Path) -> Path:
    """It, or the nearest folder above it that is there."""
    return next(each for each in (place, *place.absolute().parents) if each.exists())


def ask_backends() -> tuple[list[str], dict[str, str]]:
    """Devices as the backends name them, and why a backend names none.

    Each is asked in a process of its own, as asking takes hold of a TPU.
    """
    asked = {
        package: subprocess.Popen(
            [sys.executable, "-c", question],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for package, question in _QUESTIONS.items()
        if importlib.util.find_spec(package) is not None
    }
    devices: list[str] = []
    problems: dict[str, str] = {}
    try:
        for package, process in asked.items():
            named, problem = _answer(process)
            devices += [f"{package}: {name}" for name in named]
            problems.update({package: problem} if problem else {})
    finally:
        for process in asked.values():
            process.kill()
            process.communicate()
    return devices, problems


def _answer(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """The names, and what went wrong."""
    try:
        output, complaints = process.communicate(timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"it did not name its devices within {_PATIENCE_SECONDS:.0f} s"
    problem = ""
    if process.returncode != 0:
        problem = (complaints.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
    return [line for line in output.splitlines() if line], problem


_PATIENCE_SECONDS = 180.0  # a TPU takes its time
_QUESTIONS = {
    "jax": "import jax\nfor device in jax.devices(): print(device.device_kind)",
    "torch": "import torch\n"
    "for index in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(index))\n"
    "if not torch.cuda.device_count(): print('cpu')",
}


def _can_write(folder: Path) -> bool:
    """Tried, as modes say little: of root, of what is mounted read-only."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".prefixwise-"):
            return True
    except OSError:
        return False


def model_facts(model: str) -> tuple[ModelState, str]:
    """Is it here, or how will it come? Weights are not read."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        told = token_facts(model)
        if model != "embedded" and not Path(model).expanduser().exists():
            snapshot_download(model, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return _on_the_hub(model)
    except ModelLoadError as error:
        return "missing", str(error)
    return "here", f"{told.model}: {told.source}"


def _on_the_hub(model: str) -> tuple[ModelState, str]:
    """Can it be had from here? Asked now, and not by a server that people wait for."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().model_info(model, timeout=_HUB_SECONDS)
    except OfflineModeIsEnabled:
        return "missing", "it is not in the cache, and HF_HUB_OFFLINE is set"
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return "missing", f"it is not in the cache, and the hub does not give it: {why}"
    return "comes", "it is not in the cache: the first server downloads it"


def port_is_free(port: int) -> bool:
    """0 is any port, of which one is free."""
    if port == 0:
        return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):  # overflow: it is no port at all
            return False
    return True


def check_disk(folder: Path) -> None:
    """Raises TargetError: a server whose log cannot be written is not seen to be ready."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < _LEAST_FREE_BYTES:
        expected = f"expected {_LEAST_FREE_BYTES / 1e6:g} MB or more"
        raise TargetError(f"no space left on device: {free / 1e6:.1f} MB are free in {folder}, {expected}")


def check_port(port: int) -> None:
    """Raises TargetError: every server of the run would fail in the same way."""
    if not port_is_free(port):
        raise TargetError(f"port {port} is taken on this machine: expected a free one, or 0 for any")


def backend_and_hardware(info: Mapping[str, Any]) -> tuple[str | None, str]:
    """As a server tells it."""
    backend = server_fact(info, "backend")
    kind, device = server_fact(info, "device_kind"), server_fact(info, "device")
    return _BACKENDS.get(str(backend), backend), str(device or kind or "unknown")


def peak_megabytes(info: Mapping[str, Any]) -> float | None:
    """Of the devices where the server tells it, else of the host."""
    memory = info.get("memory")
    if not isinstance(memory, Mapping):
        return None
    device = memory.get("device")
    peaks = _peaks(device) if isinstance(device, Mapping) else []
    peak = sum(peaks) if peaks else memory.get("peak_host_bytes")
    return None if not isinstance(peak, int | float) else peak / 1e6


def _peaks(stats: Mapping[str, Any]) -> list[float]:
    found: list[float] = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found += _peaks(value)
        elif "peak" in name and isinstance(value, int | float):
            found.append(value)
    return found


def end_of(process_id: int, patience_sec: float = 0.0) -> str | None:
    """How a child of ours ended; None where it runs. Its connections may break some time before it is gone."""
    until = time.monotonic() + patience_sec
    while True:
        try:
            done, status = os.waitpid(process_id, os.WNOHANG)
        except ChildProcessError:
            return None
        if done != 0:
            return _ending(status)
        if time.monotonic() >= until:
            return None
        time.sleep(0.02)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        hint = ": out of memory, if nobody did it" if number is signal.SIGKILL else ""
        return f"the server was ended by {number.name}{hint}"
    return f"the server ended with status {os.waitstatus_to_exitcode(status)}"
