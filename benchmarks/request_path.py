"""Counts the modules of the package that one request enters: one `Scorer.score`, and one `POST /v1/score`.

Both run in this process with the embedded model on PyTorch, after a first request that is not counted. A profile hook
in every thread notes the file of each function that is called.

    python -m benchmarks.request_path [--list]

The last line is JSON: {"score": modules, "http": modules}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import prefixwise
from benchmarks.ports import free_port

ROOT = str(Path(prefixwise.__file__).parent)
QUERY, SUFFIX = "Review: ", " Sentiment:"
REQUEST = {"query": QUERY, "items": ["I loved it.", "It broke."], "labels": [" positive", " negative"]}


class Tracer:
    """The files of the package whose functions are called while it is on."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def files_of(self, work: Callable[[], object]) -> list[str]:
        """Of the second of two runs."""
        work()
        self._files.clear()
        self._is_on = True
        work()
        time.sleep(0.5)  # what the other threads do after the answer
        self._is_on = False
        return sorted(os.path.relpath(file, ROOT) for file in self._files)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_on and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self._files.add(frame.f_code.co_filename)


def main() -> None:
    tracer = Tracer()
    found = {"score": trace_score(tracer), "http": trace_http(tracer)}
    for name, files in found.items():
        print(f"{name}: {len(files)} modules")
        if "--list" in sys.argv:
            print("".join(f"  {file}\n" for file in files), end="")
    print(json.dumps({name: len(files) for name, files in found.items()}))


def trace_score(tracer: Tracer) -> list[str]:
    with prefixwise.Scorer(backend="torch", device="cpu") as scorer:
        return tracer.files_of(lambda: scorer.score(QUERY, REQUEST["items"], labels=REQUEST["labels"], suffix=SUFFIX))


def trace_http(tracer: Tracer) -> list[str]:
    """The server runs in the main thread, as it does for users; another thread is its client, then stops it."""
    from prefixwise.cli.main import main as command

    port, files = free_port(), list[str]()
    body = json.dumps({**REQUEST, "suffix": SUFFIX}).encode()

    def fetch(path: str, data: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data) as answer:
            return bytes(answer.read())

    def ask() -> None:
        for _ in range(600):
            with suppress(OSError):
                fetch("/health")
                break
            time.sleep(0.2)
        files.extend(tracer.files_of(lambda: fetch("/v1/score", body)))
        os.kill(os.getpid(), signal.SIGINT)

    client = threading.Thread(target=ask)
    client.start()
    with suppress(SystemExit):
        command(["serve", "--backend", "torch", "--device", "cpu", "--port", str(port), "--log-level", "error"])
    client.join()
    return files


if __name__ == "__main__":
    main()
