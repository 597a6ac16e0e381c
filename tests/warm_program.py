"""`python -m MODULE ARGUMENTS` with its imports done: a fork of a process that has imported what our programs need.

An interpreter takes half a second of CPU time to import the command line or the server, and 2.5 s for PyTorch. A fork
has them at once, and is in all else what `subprocess` would start: a child of this process with an id, a command line,
an environment, a folder, streams, signals and an exit status of its own. The programs that it starts are forks, too.

`tests/conftest.py` puts `WarmPopen` in the place of `subprocess.Popen`. A fresh interpreter runs for other programs
and `python -c`, where variables differ that modules read when they are imported, on systems without subreapers, and
where the environment has FRESH_INTERPRETERS, as in `make test-all`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SPACE = 8192  # bytes for the command lines of forks
FRESH = "FRESH_INTERPRETERS"
IS_WARM = sys.platform == "linux" and FRESH not in os.environ
_PR_SET_CHILD_SUBREAPER = 36
_POPEN = subprocess.Popen
# By what the forkers import; huggingface_hub and jax are not among it.
_READ_BY_IMPORTS = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "LD_", "MALLOC_", "FSSPEC_")


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS)}


@dataclass(frozen=True)
class Forker:
    """A process that has imported much and forks (tests/warm_forker.py), as others see it."""

    address: str
    settings: dict[str, str]
    process_group: int

    @classmethod
    def at(cls, listener: socket.socket) -> Forker:
        """One of this process's group and variables."""
        return cls(listener.getsockname().decode(), _settings(os.environ), os.getpgid(0))

    def fits(self, environment: Mapping[str, str], *, new_session: bool) -> bool:
        """A fork is in the forker's process group, unless it leads a session."""
        return _settings(environment) == self.settings and (new_session or self.process_group == os.getpgid(0))

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The id of a new child of this process: its own parent ends at once, and we are the next reaper."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, _subreaper():
            connection.connect(self.address.encode())
            socket.send_fds(connection, [json.dumps(request).encode()], streams)
            process_id = int(connection.recv(64))
            connection.recv(1)  # nothing: it is closed when the child's first parent is gone
            return process_id


@contextmanager
def _subreaper() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _start_forker(*, with_torch: bool) -> Forker:
    """It ends with this process."""
    with listen() as listener:
        number = listener.fileno()
        command = [sys.executable, "-m", "tests.warm_forker", str(number), str(int(with_torch)), " " * SPACE]
        process = _POPEN(command, cwd=ROOT, pass_fds=[number], stdin=subprocess.PIPE)
        assert process.stdin is not None
        atexit.register(process.wait)
        atexit.register(process.stdin.close)  # first
        return Forker.at(listener)


def listen() -> socket.socket:
    """Where a forker gets its requests."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the system finds a name, which is nowhere on disk
    listener.listen(64)
    return listener


_lock = threading.Lock()
_forkers: dict[bool, Forker | None] = {}  # by whether they have PyTorch
_owner = os.getpid()


def inherit(forker: Forker, *, with_torch: bool) -> None:
    """In a fork: what this process starts is forked by one of its own."""
    global _owner
    _owner = os.getpid()
    _forkers.update({False: forker, True: forker if with_torch else None})
    subprocess.Popen = WarmPopen  # type: ignore[misc]


def _starts_programs(module: str, *arguments: str) -> bool:
    is_agent = module == "prefixwise.bench.remote.agent" and arguments[:1] in (("chunk",), ("matrix",))
    is_verb = arguments[:1] in (("ops",), ("validate",)) or arguments[:2] in (("bench", "ab"), ("bench", "load"))
    return is_agent or is_verb or module.startswith("benchmarks.")


_WITHOUT_MODEL = ("tests.server", "tests.cli", "tests.bench", "prefixwise.bench.remote", "prefixwise.bench.run")


def _imports_torch(module: str, *arguments: str) -> bool:
    """Whether the program loads a model with PyTorch; one that needs no PyTorch and has it is slower, not wrong."""
    return (
        find_spec("torch") is not None
        and not {"fake", "--backend=fake", "jax", "--backend=jax", "load_jax"} & {*arguments}
        and not module.startswith(_WITHOUT_MODEL)
        and not {"aot", "bench", "cluster", "models", "ops", "profiles", "--help", "--version"} & {*arguments[:1]}
    )


def _forker_of(args: object) -> Forker | None:
    words = [str(each) for each in args] if isinstance(args, list | tuple) else []
    is_ours = words[2:] and words[2].split(".")[0] in ("prefixwise", "benchmarks", "tests")
    is_fork_of_tests = os.getpid() != _owner  # which would not become the parent
    if words[:2] != [sys.executable, "-m"] or not is_ours or not IS_WARM or is_fork_of_tests:
        return None
    with_torch = _imports_torch(*words[2:])
    if with_torch not in _forkers:
        _forkers[with_torch] = _start_forker(with_torch=with_torch)
    return _forkers[with_torch]


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`; `[sys.executable, "-m", MODULE, ...]` is forked if the module is one of ours."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        _, preexec, _, pass_fds, cwd, env, _, _, shell, *handles = others
        streams, (_, gid, gids, uid, umask, new_session, *group) = handles[:6], handles[6:]
        is_plain = not (preexec or pass_fds or shell or gid or gids or uid) and umask == -1 and group in ([], [-1])
        environment = dict(os.environ if env is None else env)
        with _lock:
            forker = _forker_of(args) if is_plain and FRESH not in environment else None
            if forker is None or not forker.fits(environment, new_session=bool(new_session)):
                super()._execute_child(args, *others)  # type: ignore[misc]  # the standard library's own
                return
            request = {
                "arguments": [str(each) for each in args[2:]],
                "environment": environment,
                "folder": str(cwd or Path.cwd()),
                "new_session": bool(new_session),
                "starts_programs": _starts_programs(*map(str, args[2:])),
            }
            own = [streams[0], streams[3], streams[5]]  # -1: this process's
            self.pid = forker.fork(request, [each if each != -1 else place for place, each in enumerate(own)])
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
