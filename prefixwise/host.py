"""What differs between hosts: processes, memory, the processor, which packages to install; and files of this host.

Linux provides these facts in /proc; macOS has a portable way for each. Windows is supported through WSL only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

PROC = Path("/proc")  # tests set a missing folder, to use the portable ways
DEVICES = Path("/dev")
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def install_command(extra: str) -> str:
    """The command that installs the packages of one of our extras.

    It names the packages of the extra, never ours: an index may have another project by that name, or none.
    """
    from importlib import metadata  # takes longer to import than all the rest of this module

    try:
        listed = metadata.requires("prefixwise") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        return f'pip install -e ".[{extra}]", in the checkout'
    return " ".join(["pip install", *(f'"{requirement}"' for requirement in _requirements(listed, extra))])


def _requirements(listed: list[str], extra: str) -> list[str]:
    found = []
    for entry in listed:
        requirement, _, marker = (part.strip() for part in entry.partition(";"))
        conditions = marker.split(" and ")
        if not any(condition.replace("'", '"') == f'extra == "{extra}"' for condition in conditions):
            continue
        if requirement.startswith("prefixwise["):
            found += _requirements(listed, requirement.partition("[")[2].rstrip("]"))
            continue
        others = " and ".join(each for each in conditions if not each.startswith("extra"))
        found.append(f"{requirement}; {others}".replace('"', "'") if others else requirement)
    return found


def cpu_name() -> str:
    """The processor's name as its vendor gives it; never empty."""
    facts = _cpu_facts()
    name = facts.get("model name") or _last_word_of("lscpu", "Model name:")
    if not name and sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
    if not name and "CPU part" in facts:  # ARM, whose kernel gives numbers
        name = f"{platform.machine()} implementer {facts.get('CPU implementer', '?')} part {facts['CPU part']}"
    return name or platform.processor() or platform.machine() or "unknown CPU"


def is_arm() -> bool:
    """Is the processor one of ARM's, with 64 bits?"""
    return platform.machine() in ("aarch64", "arm64")


def cpu_features() -> frozenset[str]:
    """The kernel's names of the processor's instruction sets; empty if it lists none."""
    facts = _cpu_facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def _cpu_facts() -> dict[str, str]:
    """The facts of the last core in /proc/cpuinfo; on a machine with two kinds of cores, of one kind only."""
    try:
        lines = (PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _last_word_of(program: str, label: str) -> str:
    lines = _output(program).splitlines()
    return next((line.removeprefix(label).strip() for line in lines if line.startswith(label)), "")


def _output(*command: str) -> str:
    """The output of a program; empty if it is missing or fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def num_cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def has_accelerator() -> bool:
    """Whether the host has the device file of a GPU or a TPU, and the environment does not hide it from programs."""
    found = [*DEVICES.glob("nvidia[0-9]*"), *DEVICES.glob("accel[0-9]*"), *DEVICES.glob("vfio/[0-9]*")]
    is_hidden = os.environ.get("JAX_PLATFORMS") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return bool(found) and not is_hidden


def peak_memory_bytes() -> int:
    """The peak resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back_free_memory() -> None:
    """Return what this process has freed to the host: glibc keeps it, in an arena for every thread."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


NO_THREAD = "cannot start a thread: this user may have no more processes and threads; raise ulimit -u"


def lacks_threads(error: BaseException) -> bool:
    """Whether the host did not let Python start a thread."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


def num_open_files() -> int:
    """How many files and sockets this process has open; where the host does not tell, as many as it starts with."""
    for folder in (PROC / "self/fd", Path("/dev/fd")):
        with suppress(OSError):
            return sum(1 for _ in folder.iterdir())
    return 16


def raise_file_limit(wanted: int) -> int:
    """Let this process open so many files, as far as the host allows; returns how many it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    most = wanted if hard == infinite else min(wanted, hard)
    if soft != infinite and soft < most:
        with suppress(OSError, ValueError):  # macOS has a second limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return wanted if soft == infinite else soft


def this_boot() -> str:
    """Identifies the host since its last start, and its process id namespace: containers share a kernel."""
    known = [socket.gethostname()]
    if PROC.exists():
        with suppress(OSError):
            known.append((PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        with suppress(OSError):
            known.append(str((PROC / "self/ns/pid").readlink()))
    elif sys.platform == "darwin":
        known.append(_output("sysctl", "-n", "kern.bootsessionuuid"))
    return " ".join(known)


def process_start(process_id: int) -> str | None:
    """When a process began, as the host reports it: a later process with the same id has another value.

    None if there is no such process, or only a zombie.
    """
    if (PROC / "self/stat").exists():
        try:
            fields = (PROC / f"{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else fields[19]
    state, _, started = _output("ps", "-o", "state=,lstart=", "-p", str(process_id)).partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def end_with_parent(parent: int) -> None:
    """Send this process SIGTERM when its parent ends: by the kernel on Linux, else by a thread that polls.

    Exits at once if the parent has ended already.
    """
    if not (PROC.exists() and _ask_kernel_for_signal()):
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True, name="watch-parent").start()
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


def _ask_kernel_for_signal() -> bool:
    try:
        return int(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)) == 0
    except (OSError, AttributeError):  # no such call
        return False


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def user_cache_folder() -> Path:
    """The folder for files that this user's programs can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@contextmanager
def replacing(path: Path, folder: Path | None = None) -> Iterator[Path]:
    """Write a file so that readers see all of it or nothing.

    The block writes and closes the temporary file NAME.1f0c2b9a.tmp, whose path it gets. On success the file is flushed
    to disk and renamed to `path`; after an error it is removed. The temporary file is beside `path`, or in `folder`,
    which must be on the same file system. Missing folders are made. Raises OSError.
    """
    temporary = (folder or path.parent) / f"{path.name}.{uuid4().hex[:8]}.tmp"
    for parent in (path.parent, temporary.parent):
        parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # else a power cut could leave the name without the bytes
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
