"""This itemwise as a wheel, where its source is at hand."""

from __future__ import annotations

import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from itemwise import _version
from itemwise.ops.targets.base import OnLine, TargetError
from itemwise.ops.targets.processes import run_streamed

_SETUPTOOLS = 77  # as pyproject.toml asks for


def source_root() -> Path | None:
    """The project that this package runs from; None where it was installed from a wheel."""
    root = Path(_version.__file__).resolve().parents[1]
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return None
    return root if project.get("name") == "itemwise" else None


def build_wheel(root: Path, scratch: Path, on_line: OnLine | None = None) -> Path:
    """In a copy: a build leaves files beside the source, and takes in what an earlier one left. Raises TargetError."""
    source, output = scratch / "source", scratch / "wheel"
    _copy_source(root, source)
    isolation = ["--no-build-isolation"] if _has_setuptools() else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", *isolation]
    done = run_streamed([*command, "--wheel-dir", str(output), str(source)], on_line)
    wheels = list(output.glob("*.whl"))
    if done.status != 0 or len(wheels) != 1:
        mend = f" (mend it with: {sys.executable} -m ensurepip)" if "No module named pip" in done.complaints else ""
        raise TargetError(f"the wheel of {root} cannot be built: {done.words}{mend}")
    return wheels[0]


def _copy_source(root: Path, destination: Path) -> None:
    """The package, and the files beside it that its description names."""
    destination.mkdir(parents=True)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / file, destination / file)
    shutil.copytree(root / "itemwise", destination / "itemwise", ignore=shutil.ignore_patterns("__pycache__"))


def _has_setuptools() -> bool:
    """Then no other need be fetched."""
    try:
        return int(version("setuptools").partition(".")[0]) >= _SETUPTOOLS
    except (PackageNotFoundError, ValueError):
        return False
