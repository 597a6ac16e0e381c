"""What a machine tells through plain `sh`: before it has prefixwise, or even a Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prefixwise.bench.remote.targets.base import Target, TargetError

OLDEST, TOO_NEW = (3, 11), (3, 14)  # requires-python
WANTED = "3.11 to 3.13"
BASE_NAMES = ("python3", "python3.13", "python3.12", "python3.11")
_VERSION = re.compile(r"Python (\d+)\.(\d+)\S*")

# $1 is the folder of runs, all others are interpreters. One line for each thing that there is; tabs keep its words
# apart. That a folder can be written to is tried, as a mode says little: of root, of what is mounted read-only.
_SCRIPT = r"""
place=$1; shift
while [ ! -e "$place" ]; do
  above=$(dirname -- "$place"); [ "$above" = "$place" ] && break; place=$above
done
printf 'system\t%s\n' "$(uname -sm)"
printf 'place\t%s\n' "$(cd -- "$place" 2>/dev/null && pwd || printf %s "$place")"
printf 'disk\t%s\n' "$(df -Pk -- "$place" 2>/dev/null | tail -n 1)"
complaint=$(mktemp -d "$place/.prefixwise-XXXXXX" 2>&1) && rmdir -- "$complaint" && complaint=
[ -d "$place" ] || complaint="$place is not a folder"
printf 'complaint\t%s\n' "$complaint"
number=0
for python in "$@"; do
  number=$((number + 1))
  version=$("$python" --version 2>&1) || continue
  venv=no; "$python" -c 'import venv, ensurepip' 2>/dev/null && venv=yes
  printf 'python\t%s\t%s\t%s\n' "$number" "$version" "$venv"
done
names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) && printf '%s\n' "$names" |
  while read -r name; do printf 'gpu\t%s\n' "$name"; done
for file in /dev/accel[0-9]* /dev/accel/* /dev/vfio/[0-9]*; do
  [ -e "$file" ] && printf 'file\t%s\n' "$file"
done
:
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that runs."""

    path: str  # as it was asked for
    version: tuple[int, int]
    title: str  # Python 3.11.7
    has_venv: bool  # and ensurepip, without which a venv has no pip

    @property
    def fits(self) -> bool:
        return OLDEST <= self.version < TOO_NEW


@dataclass(frozen=True)
class BareFacts:
    """Of one machine."""

    system: str = ""
    place: str = ""  # the folder of runs, or the nearest above it that exists
    free_bytes: int | None = None
    complaint: str = ""  # why nothing can be written there
    interpreters: tuple[Interpreter, ...] = ()
    gpus: tuple[str, ...] = ()  # as nvidia-smi names them
    device_files: tuple[str, ...] = ()  # how TPUs show; /dev/vfio/0 may be something else

    def interpreter(self, path: str) -> Interpreter | None:
        return next((each for each in self.interpreters if each.path == path), None)

    def base(self, names: Sequence[str] = BASE_NAMES) -> Interpreter | None:
        """The first that a venv can be made with; else the first of a version that fits."""
        fitting = [each for each in self.interpreters if each.path in names and each.fits]
        return next((each for each in fitting if each.has_venv), fitting[0] if fitting else None)


def ask_bare(target: Target, folder: str, pythons: Sequence[str] = ()) -> BareFacts:
    """Of interpreters: those asked for, and those on PATH. Raises TargetError."""
    asked = list(dict.fromkeys([*pythons, *BASE_NAMES]))
    done = target.run(["sh", "-c", _SCRIPT, "sh", folder, *asked])
    if done.status != 0:
        raise TargetError(f"{target.name}: expected a shell, sh, got: {done.words}")
    return read_bare(done.output, asked)


def read_bare(output: str, asked: Sequence[str] = BASE_NAMES) -> BareFacts:
    """Of what the script wrote."""
    rows = [line.split("\t") for line in output.splitlines() if "\t" in line]

    def told(key: str) -> list[str]:
        return [row[1].strip() for row in rows if row[0] == key and row[1].strip()]

    return BareFacts(
        system="".join(told("system")),
        place="".join(told("place")),
        free_bytes=_free_bytes("".join(told("disk"))),
        complaint=" ".join(told("complaint")),
        interpreters=tuple(each for row in rows if row[0] == "python" and (each := _interpreter(row[1:], asked))),
        gpus=tuple(told("gpu")),
        device_files=tuple(told("file")),
    )


def _interpreter(words: Sequence[str], asked: Sequence[str]) -> Interpreter | None:
    """None for what says another thing than a version."""
    if len(words) != 3 or (found := _VERSION.match(words[1])) is None:
        return None
    return Interpreter(asked[int(words[0]) - 1], (int(found[1]), int(found[2])), found[0], words[2] == "yes")


def _free_bytes(line: str) -> int | None:
    """Of `df -Pk`: source, blocks, used, available, capacity, where it is mounted."""
    found = re.search(r"\s(\d+)\s+-?\d+\s+(-?\d+)\s+\S+%?\s", line)
    return int(found[2]) * 1024 if found else None
