"""A machine with little on it: a folder that is all of PATH, with a Python of our making."""

from __future__ import annotations

import shutil
from pathlib import Path

_TOOLS = ("sh", "dirname", "df", "tail", "mktemp", "rmdir", "uname", "env", "true", "test", "mkdir", "rm")


def bare_path(folder: Path, **programs: str) -> str:
    """For PATH: the tools that every system has, and programs by their names and the lines of their scripts."""
    folder.mkdir(parents=True)
    for tool in _TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    for name, script in programs.items():
        program = folder / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return str(folder)


def fake_python(version: str, *, has_venv: bool = True) -> str:
    """Says its version, and whether it can import venv and ensurepip; runs nothing."""
    return f'[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit {0 if has_venv else 1}'
