"""Facts about a target from plain `sh`, before it has prefixwise, or even a Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prefixwise.bench.remote.targets.base import Target, TargetError

OLDEST, TOO_NEW = (3, 11), (3, 14)  # requires-python
WANTED = "3.11 to 3.13"
BASE_NAMES = ("python3", "python3.13", "python3.12", "python3.11")
_VERSION = re.compile(r"Python (\d+)\.(\d+)\S*")

# $1 is the folder of runs, all further arguments are interpreters. Prints one line per fact, with tabs between fields.
# Write access is tested by writing: a mode means little for root or on a read-only mount.
_SCRIPT = r"""
place=$1; shift
while [ ! -e "$place" ]; do
  above=$(dirname -- "$place"); [ "$above" = "$place" ] && break; place=$above
done
printf 'system\t%s\n' "$(uname -sm)"
printf 'place\t%s\n' "$(cd -- "$place" 2>/dev/null && pwd || printf %s "$place")"
printf 'disk\t%s\n' "$(df -Pk -- "$place" 2>/dev/null | tail -n 1)"
write_error=$(mktemp -d "$place/.prefixwise-XXXXXX" 2>&1) && rmdir -- "$write_error" && write_error=
[ -d "$place" ] || write_error="$place is not a folder"
printf 'write_error\t%s\n' "$write_error"
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
    """A working Python."""

    path: str  # as given
    version: tuple[int, int]
    title: str  # Python 3.11.7
    has_venv: bool  # and ensurepip, without which a venv has no pip

    @property
    def fits(self) -> bool:
        return OLDEST <= self.version < TOO_NEW


@dataclass(frozen=True)
class ShellFacts:
    """The facts of one machine."""

    system: str = ""
    folder: str = ""  # the folder of runs, or its nearest existing parent
    free_bytes: int | None = None
    write_error: str = ""  # why the folder cannot be written
    interpreters: tuple[Interpreter, ...] = ()
    gpus: tuple[str, ...] = ()  # as nvidia-smi names them
    device_files: tuple[str, ...] = ()  # of TPUs; /dev/vfio/0 may be another device

    def interpreter(self, path: str) -> Interpreter | None:
        return next((each for each in self.interpreters if each.path == path), None)

    def base(self, names: Sequence[str] = BASE_NAMES) -> Interpreter | None:
        """The first that can create a venv; else the first of a supported version."""
        fitting = [each for each in self.interpreters if each.path in names and each.fits]
        return next((each for each in fitting if each.has_venv), fitting[0] if fitting else None)


def read_shell_facts(target: Target, folder: str, pythons: Sequence[str] = ()) -> ShellFacts:
    """Run the script on the target, for these interpreters and those on PATH. Raises TargetError."""
    asked = list(dict.fromkeys([*pythons, *BASE_NAMES]))
    done = target.run(["sh", "-c", _SCRIPT, "sh", folder, *asked])
    if done.status != 0:
        raise TargetError(f"{target.name}: expected a working sh, got: {done.message}")
    return parse_shell_facts(done.stdout, asked)


def parse_shell_facts(output: str, asked: Sequence[str] = BASE_NAMES) -> ShellFacts:
    """Parse the output of the script."""
    rows = [line.split("\t") for line in output.splitlines() if "\t" in line]

    def values(key: str) -> list[str]:
        return [row[1].strip() for row in rows if row[0] == key and row[1].strip()]

    return ShellFacts(
        system="".join(values("system")),
        folder="".join(values("place")),
        free_bytes=_free_bytes("".join(values("disk"))),
        write_error=" ".join(values("write_error")),
        interpreters=tuple(each for row in rows if row[0] == "python" and (each := _interpreter(row[1:], asked))),
        gpus=tuple(values("gpu")),
        device_files=tuple(values("file")),
    )


def _interpreter(fields: Sequence[str], asked: Sequence[str]) -> Interpreter | None:
    """None if the program does not print a version."""
    if len(fields) != 3 or (found := _VERSION.match(fields[1])) is None:
        return None
    return Interpreter(asked[int(fields[0]) - 1], (int(found[1]), int(found[2])), found[0], fields[2] == "yes")


def _free_bytes(line: str) -> int | None:
    """From a line of `df -Pk`: source, blocks, used, available, capacity, mount point."""
    found = re.search(r"\s(\d+)\s+-?\d+\s+(-?\d+)\s+\S+%?\s", line)
    return int(found[2]) * 1024 if found else None
