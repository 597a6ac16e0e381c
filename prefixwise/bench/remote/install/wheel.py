"""This prefixwise as a wheel: built from its source, or packed again from the files that a wheel installed."""

from __future__ import annotations

import shutil
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from prefixwise import _version
from prefixwise.bench.remote.targets.base import OnLine, TargetError
from prefixwise.bench.remote.targets.processes import run_streamed

_SETUPTOOLS = 77  # as pyproject.toml asks for


def source_root() -> Path | None:
    """The project that this package runs from; None where it was installed from a wheel."""
    root = Path(_version.__file__).resolve().parents[1]
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return None
    return root if project.get("name") == "prefixwise" else None


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


def pack_installed(output: Path) -> Path:
    """The wheel that this package was installed from, made of the files that it left. Raises TargetError."""
    try:
        installed = distribution("prefixwise")
    except PackageNotFoundError:
        raise TargetError("prefixwise is not installed here, and runs from no checkout: expected one of them") from None
    files = [each for each in installed.files or () if _is_of_the_wheel(each.parts)]
    if not any(each.parts == ("prefixwise", "_version.py") for each in files):
        raise TargetError("the installed prefixwise does not list its files (RECORD): install it again from a wheel")
    output.mkdir(parents=True)
    path = output / _wheel_name(installed)
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        for each in files:
            wheel.write(str(each.locate()), str(each))
    return path


def _is_of_the_wheel(parts: tuple[str, ...]) -> bool:
    """Not what an installer adds: scripts, compiled modules and notes. pip does not check RECORD."""
    return (
        parts[0] != ".."
        and "__pycache__" not in parts
        and parts[-1] not in ("INSTALLER", "REQUESTED", "direct_url.json")
    )


def _wheel_name(installed: Distribution) -> str:
    return f"prefixwise-{installed.version}-py3-none-any.whl"


def _copy_source(root: Path, destination: Path) -> None:
    """The package, and the files beside it that its description names."""
    destination.mkdir(parents=True)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / file, destination / file)
    shutil.copytree(root / "prefixwise", destination / "prefixwise", ignore=shutil.ignore_patterns("__pycache__"))


def _has_setuptools() -> bool:
    """Then no other need be fetched."""
    try:
        return int(version("setuptools").partition(".")[0]) >= _SETUPTOOLS
    except (PackageNotFoundError, ValueError):
        return False
