"""The process that forks for tests/warm_program.py: `python -m tests.warm_forker LISTENER WITH_TORCH SPACE`.

It has one thread, and its stdin ends when whoever has started it does.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.warm_program import Forker, inherit, listen

_MODULES = (
    "fsspec.implementations.local",
    "prefixwise.backends.fake",
    "prefixwise.batch.job",
    "prefixwise.batch.worker",
    "prefixwise.bench.kinds.registry",
    "prefixwise.bench.remote.on_target.chunk",
    "prefixwise.bench.remote.on_target.client_matrix",
    "prefixwise.bench.run.load",
    "prefixwise.bench.run.load_worker",
    "prefixwise.bench.run.matrix",
    "prefixwise.bench.run.validation",
    "prefixwise.cli.batch_run",
    "prefixwise.cli.bench_verbs",
    "prefixwise.cli.main",
    "prefixwise.cli.ops.verbs",
    "prefixwise.cli.run_request",
    "prefixwise.launch.loading",
    "prefixwise.models.gguf",
    "prefixwise.server.launch",
    "prefixwise.server.workers.supervisor",
    "rich.console",
    "tests.checkpoints",
    "tests.prompts.merging_tokenizer",
    "tokenizers",
    "typer._adapters",
    "uvicorn.lifespan.on",
)
_TORCH_MODULES = ("prefixwise.backends.torch.backend", "prefixwise.scorer")


def next_request(listener: socket.socket) -> tuple[dict[str, Any], Sequence[int]]:
    """In a fork: what it is to do. The process that forks does not return."""
    while True:
        if 0 in select.select([0, listener.fileno()], [], [])[0]:
            os._exit(0)
        connection = listener.accept()[0]
        with connection:
            message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            between = os.fork()
            if between == 0:
                first_parent = os.getpid()
                child = os.fork()
                if child == 0:
                    break
                connection.send(str(child).encode())
                os._exit(0)
            os.waitpid(between, 0)
            for each in streams:
                os.close(each)
    while os.getppid() == first_parent:
        time.sleep(0.001)
    return json.loads(message), streams


def own_forker(*, with_torch: bool) -> socket.socket | None:
    """For a program that starts others: a second fork that forks them, so that this one becomes their parent.

    There it returns where requests come in, here None.
    """
    listener = listen()
    reader, writer = os.pipe()  # it ends with this process
    if os.fork() == 0:
        os.dup2(reader, 0)
        os.closerange(reader, writer + 1)
        return listener
    os.close(reader)
    inherit(Forker.at(listener), with_torch=with_torch)
    listener.close()
    return None


def become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """What `subprocess` and a fresh interpreter would have made of this process."""
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    show_command_line(request["arguments"])
    open_streams()


def show_command_line(arguments: Sequence[str]) -> None:
    """To the system and its users: over our own, which has space for it."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = b"".join(each.encode() + b"\0" for each in (sys.executable, "-m", *arguments))
    if len(words) <= end - start:
        ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


def open_streams() -> None:
    """As the interpreter does at its start: whether lines are written at once depends on who reads them."""
    is_unbuffered = sys.stdout.write_through  # type: ignore[union-attr]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        file = open(number, "wb" if number else "rb", 0 if number and is_unbuffered else -1, closefd=False)  # noqa: SIM115
        is_read_by_line = not is_unbuffered and (number == 2 or os.isatty(number))
        stream = io.TextIOWrapper(file, before.encoding, before.errors, "\n", is_read_by_line, is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in (*_MODULES, *(_TORCH_MODULES if sys.argv[2] == "1" else ())):
        with suppress(ImportError):  # a package that is not there: who needs it will say so
            import_module(name)
    gc.collect()
    gc.freeze()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    forker: socket.socket | None = listener
    while forker is not None:
        request, streams = next_request(forker)
        forker.close()
        if request["new_session"]:
            os.setsid()
        forker = own_forker(with_torch=sys.argv[2] == "1") if request["starts_programs"] else None
    become(request, streams)
    signal.signal(signal.SIGINT, interrupt)
    sys.argv = request["arguments"]
    sys.modules.pop(sys.argv[0], None)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
