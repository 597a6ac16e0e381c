"""Facts about this machine (Python, backends, devices, disk, ports, models), and about a server on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prefixwise._version import __version__
from prefixwise.bench.processes import ending
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.server_facts import server_fact
from prefixwise.bench.tokens import token_facts
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.sources import split_revision

ModelState = Literal["here", "comes", "missing"]  # comes: the first server downloads it

# The servers of a run have no API key, even if this machine's environment sets one.
NO_KEY: dict[str, str | None] = {"PREFIXWISE_API_KEY": None}

_HUB_SECONDS = 15.0
_MIN_FREE_BYTES = 16_000_000
_BACKENDS = {"torch": "pytorch"}  # names in artifacts


def facts(folder: str, model: str, port: int) -> dict[str, Any]:
    """Facts for `ops doctor`, and for the checks before a comparison."""
    existing = _existing(Path(folder).expanduser())
    found, problems = query_backends()
    model_state, model_note = model_facts(model) if model else (None, None)
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
        "model": None if model_state == "here" else model_note,
    }


def _existing(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def query_backends() -> tuple[list[str], dict[str, str]]:
    """Devices as the backends name them, and the errors of backends that name none.

    Each backend is queried in a process of its own, because the query acquires a TPU.
    """
    processes = {
        package: subprocess.Popen(
            [sys.executable, "-c", query],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for package, query in _QUERIES.items()
        if importlib.util.find_spec(package) is not None
    }
    devices: list[str] = []
    problems: dict[str, str] = {}
    try:
        for package, process in processes.items():
            named, problem = _answer(process)
            devices += [f"{package}: {name}" for name in named]
            problems.update({package: problem} if problem else {})
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return devices, problems


def _answer(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """The names of the devices, and the error."""
    try:
        output, stderr = process.communicate(timeout=_QUERY_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"it did not name its devices within {_QUERY_TIMEOUT_SECONDS:.0f} s"
    problem = ""
    if process.returncode != 0:
        problem = (stderr.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
    return [line for line in output.splitlines() if line], problem


_QUERY_TIMEOUT_SECONDS = 180.0  # a TPU is slow to start
_QUERIES = {
    "jax": "import jax\nfor device in jax.devices(): print(device.device_kind)",
    "torch": "import torch\n"
    "for index in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(index))\n"
    "if not torch.cuda.device_count(): print('cpu')",
}


def _can_write(folder: Path) -> bool:
    """Test by writing: a mode means little for root or on a read-only mount."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".prefixwise-"):
            return True
    except OSError:
        return False


def model_facts(model: str) -> tuple[ModelState, str]:
    """Whether the model is here, can be downloaded, or is missing. Does not read weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = token_facts(model)
        if model != "embedded" and not Path(model).expanduser().exists():
            model_id, revision = split_revision(model)
            snapshot_download(model_id, revision=revision, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return _on_the_hub(model)
    except ModelLoadError as error:
        return "missing", str(error)
    return "here", f"{found.model}: {found.source}"


def _on_the_hub(model: str) -> tuple[ModelState, str]:
    """Whether this machine can download the model. Checked now, before a server starts."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        model_id, revision = split_revision(model)
        HfApi().model_info(model_id, revision=revision, timeout=_HUB_SECONDS)
    except OfflineModeIsEnabled:
        return "missing", "not in the hub cache, and HF_HUB_OFFLINE is set"
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return "missing", f"not in the hub cache, and the hub refuses it: {why}"
    return "comes", "not in the hub cache: the first server downloads it"


def port_is_free(port: int) -> bool:
    """True for a free port, and for 0, any free port."""
    if port == 0:
        return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):  # overflow: not a port number
            return False
    return True


def check_disk(folder: Path) -> None:
    """Raises TargetError if the disk is full: a server's log, which reports that it is ready, needs space."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < _MIN_FREE_BYTES:
        expected = f"expected {_MIN_FREE_BYTES / 1e6:g} MB or more"
        raise TargetError(f"no space left on device: {free / 1e6:.1f} MB are free in {folder}, {expected}")


def check_port(port: int) -> None:
    """Raises TargetError if the port is taken: every server of the run would fail."""
    if not port_is_free(port):
        raise TargetError(f"port {port} is taken on this machine: expected a free one, or 0 for any")


def backend_and_hardware(info: Mapping[str, Any]) -> tuple[str | None, str]:
    """Backend and device as the server reports them."""
    backend = server_fact(info, "backend")
    kind, device = server_fact(info, "device_kind"), server_fact(info, "device")
    return _BACKENDS.get(str(backend), backend), str(device or kind or "unknown")


def peak_megabytes(info: Mapping[str, Any]) -> float | None:
    """Peak memory of the devices if the server reports it, else of the host."""
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


def end_of(process_id: int, timeout_sec: float = 0.0) -> str | None:
    """How a child process ended; None if it runs. Waits a little: connections break before the process has ended."""
    until = time.monotonic() + timeout_sec
    while True:
        try:
            done, status = os.waitpid(process_id, os.WNOHANG)
        except ChildProcessError:
            return None
        if done != 0:
            return f"the server {ending(os.waitstatus_to_exitcode(status))}"
        if time.monotonic() >= until:
            return None
        time.sleep(0.02)
