"""Compiled programs on disk, beside JAX's compilation cache: a later start reads them back without tracing.

JAX's own cache saves the compiler's work, but a program must be traced and lowered to be looked up in it, under
Python's lock. A file here has the digest of everything that decides the program in its name: this package's source, the
versions of jax and what it brings, devices and driver, JAX's settings, the model's shapes, the program. Whatever is
wrong with a file, the program is traced and compiled as without it.

JAX's cache must not answer for a program that is kept here: an executable that was read from it cannot be written again
(on a CPU the copy lacks functions). So programs have a name of their own in every process that compiles them.

Answers to questions that take a start long, as which row counts of GEMMs agree, are kept in the same way, as JSON.

jax unpickles an executable, and an executable is code, so the folder must be the user's own, and nobody else may write
to it: it has mode 0700, and its files 0600. Others are not read.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh
from jax.stages import Compiled

from prefixwise.host import cpu_features, cpu_name, num_cores, replacing

log = logging.getLogger("prefixwise")

FOLDER = "executables"  # in the folder of the compilation cache
_MAGIC = b"prefixwise executable 1\n"
_DIGEST_BYTES = 32  # of the content, behind the magic: damage is found before anything is read from it
_SOURCES = ("backends/jax", "forward", "models")  # rooms whose code decides a program
_PACKAGES = ("jax", "libtpu", "nvidia-")  # beginnings of the names of packages that do
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_UNUSED_SETTINGS = ("cache", "dump", "log", "platform", "transfer")  # parts of the names of JAX's that decide nothing
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class ExecutableStore:
    """The files of one environment. Without a folder nothing is found and nothing is kept."""

    def __init__(self, folder: Path | None = None, devices: Sequence[jax.Device] = (), environment: str = "") -> None:
        self._folder = folder
        self._devices = devices
        self._environment = environment
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefixwise-save")  # its thread starts at the first use
        is_kept = folder is not None and os.access(folder, os.W_OK)
        self.suffix = f"_{uuid4().hex[:8]}" if is_kept else ""  # of the names of programs

    @classmethod
    def of(cls, cache_folder: Path | None, mesh: Mesh) -> ExecutableStore:
        """In JAX's compilation cache, if there is one. Processes that share a mesh compile together, so their programs
        are not kept here."""
        devices = mesh.devices.flatten().tolist()
        if cache_folder is None or any(each.process_index != jax.process_index() for each in devices):
            return cls()
        if "://" in str(jax.config.jax_compilation_cache_dir):  # type: ignore[attr-defined]
            return cls()  # a bucket: JAX's cache alone serves
        folder = cache_folder / FOLDER
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = _why_not_private(folder.lstat(), stat.S_ISDIR)
            if reason is None:
                _find_kernel_runtime(devices)
                return cls(folder, devices, _describe_environment(devices))
        except OSError as error:
            reason = str(error)
        log.warning("compiled programs are traced again at every start: %s: %s", folder, reason)
        return cls()

    def has(self, program: str) -> bool:
        """Whether there is a file, good or not."""
        return self._folder is not None and self._path(program).exists()

    def load(self, program: str, arguments: Sequence[Any], outputs: Any) -> Compiled | None:
        """The executable; None where it must be compiled. `program`: all that decides it, beside the environment;
        `arguments`, `outputs`: trees like those of its arguments and outputs."""
        content = self._read(program)
        if content is None:
            return None
        trees = jax.tree.structure((tuple(arguments), {})), jax.tree.structure(outputs)
        try:
            client = self._devices[0].client
            return deserialize_and_load(content, *trees, backend=client, execution_devices=self._devices)
        except Exception as error:  # jax, its runtime and pickle raise errors of many types
            log.warning("a compiled program cannot be read, and is compiled again: %s: %s", self._path(program), error)
            return None

    def save(self, program: str, compiled: Compiled) -> None:
        """Write the executable soon, on another thread."""
        self._submit(self._save, program, compiled)

    def _save(self, program: str, compiled: Compiled) -> None:
        try:
            content, _, _ = serialize(compiled)
        except Exception as error:  # not every program and not every device can
            log.warning("a compiled program cannot be kept on disk: %s", error)
            return
        self._write(program, content)

    def recall(self, question: str, find: Callable[[], Any]) -> Any:
        """The answer of an earlier start, or of `find`. It is plain JSON; `question`: all that decides it."""
        content = self._read(question)
        if content is not None:
            return json.loads(content)
        answer = find()
        self._submit(self._write, question, json.dumps(answer).encode())
        return answer

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run the function on the writing thread, if something is kept here."""
        if self._folder is not None and self.suffix:
            with suppress(RuntimeError):  # the program ends, and threads of it still score
                self._writer.submit(function, *arguments)

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def _path(self, subject: str) -> Path:
        assert self._folder is not None, "a store without a folder has no files"
        return self._folder / sha256(f"{self._environment}\n{subject}".encode()).hexdigest()

    def _read(self, subject: str) -> bytes | None:
        if self._folder is None:
            return None
        path = self._path(subject)
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
                reason = _why_not_private(os.fstat(file.fileno()), stat.S_ISREG)
                whole = b"" if reason is not None else file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            reason, whole = str(error), b""
        start = len(_MAGIC) + _DIGEST_BYTES
        content = whole[start:]
        if reason is None and whole[:start] != _MAGIC + sha256(content).digest():
            reason = "it is damaged"
        if reason is None:
            return content
        log.warning("a file of compiled programs is not used: %s: %s", path, reason)
        return None

    def _write(self, subject: str, content: bytes) -> None:
        try:
            with replacing(self._path(subject)) as temporary:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + sha256(content).digest() + content)
        except OSError as error:
            log.warning("a compiled program is not kept on disk: %s", error)


def _why_not_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> str | None:
    """The reason why somebody else may have written it; None where nobody can have."""
    if not is_kind(status.st_mode):
        return "it is something else than expected"
    if sys.platform == "win32" or status.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}; expected 700, of its files 600)"
    return None


def _find_kernel_runtime(devices: Sequence[jax.Device]) -> None:
    """GPU kernels call a library, and jax says where it is when it is about to trace one: a start that traces nothing
    would not find it."""
    if devices[0].platform == "gpu":
        with suppress(ImportError):  # then this jax has no such kernels
            import jax.experimental.pallas.mosaic_gpu  # noqa: F401


def _describe_environment(devices: Sequence[jax.Device]) -> str:
    """All that decides programs, and is the same for all programs of a process."""
    client = devices[0].client
    facts = {
        "source": _source_digest(),
        "python": sys.version,
        "packages": sorted(f"{each.name} {each.version}" for each in distributions() if _is_package(each.name)),
        "platform": (client.platform, client.platform_version),
        "driver": _NVIDIA_DRIVER.read_text() if _NVIDIA_DRIVER.exists() else None,
        "devices": [(each.id, each.device_kind, getattr(each, "compute_capability", None)) for each in devices],
        "num_devices": len(client.devices()),
        "host": (cpu_name(), sorted(cpu_features()), num_cores()) if client.platform == "cpu" else None,
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "settings": {name: str(value) for name, value in sorted(jax.config.values.items()) if _is_setting(name)},
    }
    return json.dumps(facts)


def _source_digest() -> str:
    root, digest = Path(__file__).parents[2], sha256()
    for path in sorted(file for room in _SOURCES for file in (root / room).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _is_package(name: str | None) -> bool:
    return name is not None and name.lower().startswith(_PACKAGES)


def _is_setting(name: str) -> bool:
    return not any(part in name for part in _UNUSED_SETTINGS)
