"""The server's process, from outside: started, waited for, and always ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.goals.cases import Settings
from prefixwise.bench.processes import ServerStartError, end_process, local_server

_READY = re.compile(r"ready on (http://\S+)")
_LOG_LINES = 15  # of a server that failed


class ServerFailedError(Exception):
    """It ended before it was ready; the message has the end of its log."""


@dataclass(frozen=True)
class Running:
    """A server that has measured its engine, and where it answers; None where nothing is asked of it."""

    url: str | None
    found: dict[str, Any]  # what it has written: see `server.open_engine`


@contextmanager
def running(settings: Settings, folder: Path) -> Iterator[Running]:
    """One, until the block is left. Raises ServerFailedError."""
    if settings.serve_flags is not None:
        with _serving(settings, settings.serve_flags, folder) as serving:
            yield serving
        return
    log_path, result = folder / f"{settings.backend}.log", folder / f"{settings.backend}.json"
    command = [sys.executable, "-m", "benchmarks.goals.server", json.dumps(asdict(settings)), str(result)]
    with log_path.open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=log)
        try:
            url = _wait(server, log_path, ends=not settings.http_cases)
            yield Running(url, json.loads(result.read_text(encoding="utf-8")))
        finally:
            end_process(server)


@contextmanager
def _serving(settings: Settings, flags: Sequence[str], folder: Path) -> Iterator[Running]:
    """`prefixwise serve` with these flags, on random weights in a folder of their own."""
    times = [time.perf_counter()]
    model = Path(settings.model_folder) if settings.model_folder else folder / "model"
    if not (model / "config.json").exists():
        _write_model(model, tiny=settings.tiny)
    times.append(time.perf_counter())
    warm_up = "full" if settings.needs_full_warm_up else "fast"
    command = ["--model", str(model), "--backend", settings.backend, "--warmup", warm_up, *flags]
    try:
        with local_server(command, folder / "serve.log") as server:
            times.append(time.perf_counter())
            spans = zip(("write", "load"), times, times[1:], strict=False)
            seconds = {name: round(end - begin, 1) for name, begin, end in spans}
            yield Running(server.url, _found(server.url, flags, seconds))
    except ServerStartError as error:
        raise ServerFailedError(str(error)) from None


def _write_model(folder: Path, *, tiny: bool) -> None:
    command = [sys.executable, "-m", "benchmarks.random_folder", *(["--tiny"] if tiny else []), str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerFailedError(f"random weights cannot be written:\n{_last_lines(done.stderr)}")


def _found(url: str, flags: Sequence[str], seconds: dict[str, float]) -> dict[str, Any]:
    """What the table says of a server whose engine is not measured."""
    with urlopen(f"{url}/server_info") as answer:
        info = json.load(answer)
    devices = info["devices"]
    return {
        "measured": [],
        "gemm_flops": {},
        "cold_seconds": None,
        "small_seconds": None,
        "errors": {},
        "version": info["versions"].get(devices["backend"], "?"),
        "device": devices["device"],
        "dtype": devices["dtype"],
        "serve_flags": list(flags),
        "seconds": seconds,
    }


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_LOG_LINES:])


def _wait(server: subprocess.Popen[bytes], log: Path, *, ends: bool) -> str | None:
    """Until it is ready, or, where it is to end by itself, until it has."""
    while True:
        status = server.poll()
        text = log.read_text(encoding="utf-8", errors="replace")
        found = _READY.search(text)
        if status is None and found is None:
            time.sleep(0.1)
            continue
        if found:
            return found[1]
        if status or not ends:
            raise ServerFailedError(f"the server ended with status {status}:\n{_last_lines(text)}")
        return None
