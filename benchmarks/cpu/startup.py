"""Whole processes of ours on the embedded model: seconds until they have answered."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from time import perf_counter
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.cpu.process import PeerFailedError
from benchmarks.ports import free_port
from prefixwise.bench.processes import end_process, ending

SCORE = (
    *("score", "--query", "Query: how do I keep basil alive?\nDocument: ", "--suffix", "\nRelevant:"),
    *("--item", "Water it when the soil is dry.", "--item", "The train leaves at nine."),
    *("--item", "Basil wants six hours of sun.", "--label", " yes", "--label", " no", "--json", "--quiet"),
)
_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 120.0


def score_seconds() -> float:
    """From the start of `prefixwise score` to its end. Raises PeerFailedError."""
    begin = perf_counter()
    done = subprocess.run([sys.executable, "-m", "prefixwise", *SCORE], capture_output=True, text=True, check=False)
    seconds = perf_counter() - begin
    if done.returncode != 0 or len(json.loads(done.stdout)["scores"]) != 3:
        raise PeerFailedError(f"prefixwise score {ending(done.returncode)}: {done.stderr.strip()}")
    return seconds


def serve_seconds(folder: Path) -> float:
    """From the start of `prefixwise serve` to `/health` 200; its log is in `folder`. Raises PeerFailedError."""
    port = free_port()
    log_path = folder / "serve.log"
    command = [sys.executable, "-m", "prefixwise", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with log_path.open("w", encoding="utf-8") as log:
        begin = perf_counter()
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not _is_healthy(port):
                if server.poll() is not None or perf_counter() - begin > _PATIENCE_SECONDS:
                    raise PeerFailedError(f"no answer of /health:\n{log_path.read_text(encoding='utf-8')}")
                time.sleep(_POLL_SECONDS)
            return perf_counter() - begin
        finally:
            end_process(server)


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):  # not yet: nobody listens, or 503
        return False
