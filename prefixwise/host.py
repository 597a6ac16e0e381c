"""What differs between hosts: processes, memory, the processor, and which packages to install.

Linux is asked through /proc. Elsewhere (macOS) there is a portable way for each; Windows is not supported, other than
through WSL.
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
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

PROC = Path("/proc")  # a test points it at a folder that is not there, to try the portable ways
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def install_command(extra: str) -> str:
    """The command that installs what an extra of ours needs.

    It names the packages of the extra, never ours: an index may know another project by that name, or none.
    """
    try:
        listed = requires("prefixwise") or []
    except PackageNotFoundError:  # it runs from a checkout
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
    """The processor as its vendor calls it; never empty."""
    facts = _cpu_facts()
    name = facts.get("model name") or _last_word_of("lscpu", "Model name:")
    if not name and sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
    if not name and "CPU part" in facts:  # ARM, whose kernel gives numbers
        name = f"{platform.machine()} implementer {facts.get('CPU implementer', '?')} part {facts['CPU part']}"
    return name or platform.processor() or platform.machine() or "unknown CPU"


def cpu_features() -> frozenset[str]:
    """The kernel's names of the instructions that the processor has; none where it does not list them."""
    facts = _cpu_facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def _cpu_facts() -> dict[str, str]:
    """Of the last core in /proc/cpuinfo; on a machine with cores of two kinds, the other kind is left out."""
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
    """What a program prints; nothing where it is not there or fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def peak_memory_bytes() -> int:
    """The most that this process has held at a time."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def this_boot() -> str:
    """The host since its last start, and its process ids: containers share a kernel and have ids of their own."""
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
    """When a process began, in the host's words: a later one with the same id has another.

    None where there is no such process, or only a zombie.
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
    """Send this process SIGTERM when its parent ends, however that is: by the kernel on Linux, else by a thread that
    looks. A parent that has ended already ends us at once."""
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
