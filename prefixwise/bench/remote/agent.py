"""The agent on the target: `python -m prefixwise.bench.remote.agent VERB`, called by agent_client.py.

    facts    reports what this machine has
    clean    stops servers that earlier runs have left
    begin    creates the folder of a sweep, or resumes it
    chunk    measures one chunk size: server, requests, row
    matrix   runs one server, and `prefixwise bench matrix` against it
    release  releases the lock of this machine
    list     lists the runs on this machine

Messages go to stderr; the last line on stdout is one JSON object. When stdin closes, the caller is gone: the agent then
stops everything that it has started, and exits.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefixwise.bench.processes import ended_by_signals
from prefixwise.bench.remote.on_target import run_lock, server_records
from prefixwise.bench.remote.spec import SILENCE_SECONDS, ClientMatrixSpec, SweepSpec
from prefixwise.contract.errors import PrefixwiseError


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 0, or with 1 and an `error:` line."""
    parser = argparse.ArgumentParser(prog="prefixwise.bench.remote.agent", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, (_, options) in _VERBS.items():
        own = verbs.add_parser(verb)
        for option, kind in options.items():
            own.add_argument(
                option, type=kind, required=kind is not _flag, **({"default": ""} if kind is _flag else {})
            )
    given = vars(parser.parse_args(arguments))
    run, _ = _VERBS[given.pop("verb")]
    sys.exit(_answer(lambda: run(**given)))


def _answer(run: Callable[[], dict[str, Any]]) -> int:
    threading.Thread(target=_watch_stdin, daemon=True).start()
    try:
        with ended_by_signals():
            answer = run()
    except PrefixwiseError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:  # a full disk, a folder that cannot be made
        say(f"error: {error.strerror or error}: {error.filename or 'no file is named'}")
        return 1
    print(json.dumps(answer), flush=True)
    return 0


def say(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def _watch_stdin() -> None:
    """End this process when stdin closes, or when heartbeats have begun and then stop."""
    timeout: float | None = None
    while select.select([0], [], [], timeout)[0] and os.read(0, 4096):
        timeout = SILENCE_SECONDS
    os.kill(os.getpid(), signal.SIGTERM)


def _flag(value: str) -> str:
    """The type of an optional option."""
    return value


# A run calls the agent many times: what only some verbs need (HTTP client, NumPy, pydantic) is imported there.
def _facts(folder: str, model: str, port: int) -> dict[str, Any]:
    from prefixwise.bench.remote.on_target.machine import facts

    return facts(folder, model, port)


def _begin(spec: str) -> dict[str, Any]:
    from prefixwise.bench.remote.on_target.chunk import begin_sweep

    return begin_sweep(SweepSpec.from_line(spec), say)


def _chunk(spec: str, size: int) -> dict[str, Any]:
    from prefixwise.bench.remote.on_target.chunk import measure_chunk

    return measure_chunk(SweepSpec.from_line(spec), size, say).model_dump()


def _matrix(spec: str) -> dict[str, Any]:
    from prefixwise.bench.remote.on_target.client_matrix import run_client_matrix

    return run_client_matrix(ClientMatrixSpec.from_line(spec), say)


def _list(root: str) -> dict[str, Any]:
    from prefixwise.bench.remote.folders import runs_in

    return {"runs": runs_in(Path(root).expanduser())}


_VERBS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Callable[[str], Any]]]] = {
    "facts": (_facts, {"--folder": str, "--model": _flag, "--port": int}),
    "clean": (lambda take_over: server_records.stop_left(say, take_over == "yes"), {"--take-over": _flag}),
    "begin": (_begin, {"--spec": str}),
    "chunk": (_chunk, {"--spec": str, "--size": int}),
    "matrix": (_matrix, {"--spec": str}),
    "release": (run_lock.release, {"--token": str}),
    "list": (_list, {"--root": str}),
}

if __name__ == "__main__":
    main()
