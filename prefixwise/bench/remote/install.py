"""Installs this prefixwise on a target: a wheel of the running version, in a virtual environment of its own there.

    make or find the venv  ->  build or pack the wheel here  ->  copy  ->  pip install  ->  query the new interpreter

The wheel is built from the source tree, or packed from the files of the installed wheel; no index is asked for
prefixwise by name. Only the venv is written to. A second call upgrades it in place.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from prefixwise import _version
from prefixwise._version import __version__
from prefixwise.bench.remote.shell_facts import BASE_NAMES, WANTED, Interpreter, ShellFacts, read_shell_facts
from prefixwise.bench.remote.targets.base import VENV, CommandResult, OnLine, Target, TargetError
from prefixwise.bench.remote.targets.processes import run_streamed

COMMON_EXTRAS = ("server", "harness")
BACKEND_EXTRAS = ("torch", "jax", "jax-cuda", "jax-tpu")
# Isolated (-I): packages on PYTHONPATH or in the working folder are not installed ones.
_PIP = ("-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
_SCRIPT = "import prefixwise, json, sys; print(json.dumps([prefixwise.__version__, prefixwise.__file__, sys.prefix]))"
# pip prints its progress on stdout; targets stream stderr.
_TO_STDERR = ("sh", "-c", '"$@" 1>&2', "sh")
# Status 0 if $1 exists and is neither a venv nor empty: it may be the system's Python, or another program's folder.
_IS_NOT_A_VENV = """
[ -e "$1" ] || exit 1
[ -e "$1/pyvenv.cfg" ] && exit 1
[ -d "$1" ] || exit 0
for each in "$1"/* "$1"/.*; do
  case $each in */.|*/..) continue;; esac
  [ -e "$each" ] && exit 0
done
exit 1
"""


@dataclass(frozen=True)
class InstallPlan:
    """What to install, and where."""

    python: str | None = None  # the base interpreter; None: the first supported one
    venv: str = VENV
    backend: str = "auto"  # auto, or one of BACKEND_EXTRAS
    extras: tuple[str, ...] = ()  # if given, only these
    system_site_packages: bool = False
    pip_args: tuple[str, ...] = ()

    @property
    def venv_python(self) -> str:
        return f"{self.venv.rstrip('/')}/bin/python"


@dataclass(frozen=True)
class Installed:
    """The result of an installation."""

    version: str
    python: str  # the path of the interpreter, for --python
    file: str  # of the package
    extras: tuple[str, ...]
    wheel: str  # its file name


def install_on(target: Target, plan: InstallPlan, say: OnLine) -> Installed:
    """Install or upgrade prefixwise on the target. Raises TargetError."""
    target.check_reachable()
    facts = read_shell_facts(target, plan.venv, [plan.venv_python, *([plan.python] if plan.python else [])])
    if facts.write_error:
        raise TargetError(f"{target.name}: {plan.venv} cannot be created: {facts.write_error}")
    extras = plan.extras or (*COMMON_EXTRAS, _backend_extra(target, plan.backend, facts))
    is_new = _make_venv(target, plan, facts, say)
    with tempfile.TemporaryDirectory(prefix="prefixwise-wheel-") as scratch:
        wheel = _wheel(Path(scratch), say)
        _pip_install(target, plan, _send(target, plan, wheel), extras, say, is_new=is_new)
    return _installed(target, plan, extras, wheel.name)


def _backend_extra(target: Target, backend: str, facts: ShellFacts) -> str:
    """jax-tpu on a TPU, which only JAX supports; else torch, which runs on CPUs and GPUs."""
    if backend != "auto":
        return backend
    is_tpu = target.name.startswith("gcloud-tpu://") or any(
        each.startswith("/dev/accel") for each in facts.device_files
    )
    return "jax-tpu" if is_tpu else "torch"


def _wheel(scratch: Path, say: OnLine) -> Path:
    root = source_root()
    if root is None:
        say(f"packing the wheel of the installed prefixwise {__version__}")
        return pack_installed(scratch / "wheel")
    say(f"building the wheel of {root}")
    return build_wheel(root, scratch)


def _make_venv(target: Target, plan: InstallPlan, facts: ShellFacts, say: OnLine) -> bool:
    """Create the venv, or reuse a working one. True if it is new. Raises TargetError."""
    there = facts.interpreter(plan.venv_python)
    if target.run(["sh", "-c", _IS_NOT_A_VENV, "sh", plan.venv]).status == 0:
        raise TargetError(f"{target.name}: {plan.venv} exists and is not a virtual environment: choose another --venv")
    if there is not None:
        _check_same(target, plan, there, facts)
        if not plan.system_site_packages and target.run([plan.venv_python, *_PIP, "--version"]).status == 0:
            say(f"using {plan.venv}: {there.title}")
            return False
    base = _base(target, plan, facts)
    say(f"creating {plan.venv} with {base.path}, {base.title}")
    flags = ("--system-site-packages",) if plan.system_site_packages else ()
    done = target.run([*_TO_STDERR, base.path, "-I", "-m", "venv", *flags, plan.venv], say)
    if done.status != 0:
        raise TargetError(f"{target.name}: {base.path} -m venv failed: {done.message}")
    return there is None


def _check_same(target: Target, plan: InstallPlan, there: Interpreter, facts: ShellFacts) -> None:
    """Raises TargetError if the existing venv has another Python than wanted: it cannot be changed."""
    given = facts.interpreter(plan.python) if plan.python else None
    if not there.fits or (given is not None and given.version != there.version):
        wanted = given.title if given is not None and given.fits else f"Python {WANTED}"
        raise TargetError(
            f"{target.name}: {plan.venv} has {there.title}, expected {wanted}: remove it, or choose another --venv"
        )


def _base(target: Target, plan: InstallPlan, facts: ShellFacts) -> Interpreter:
    """The interpreter that creates the venv. Raises TargetError if there is none."""
    names: Sequence[str] = (plan.python,) if plan.python else BASE_NAMES
    base = facts.base(names)
    if base is None:
        there = ", ".join(f"{each.path} is {each.title}" for each in facts.interpreters if each.path in names)
        remedy = "install one there (sudo apt install python3.11 python3.11-venv), or name one with --python"
        raise TargetError(
            f"{target.name}: expected Python {WANTED}, got {there or f'no {names[0]} that runs'}: {remedy}"
        )
    if not base.has_venv:
        package = f"python{base.version[0]}.{base.version[1]}-venv"
        raise TargetError(
            f"{target.name}: {base.path} ({base.title}) lacks venv and ensurepip: sudo apt install {package}"
        )
    return base


def _send(target: Target, plan: InstallPlan, wheel: Path) -> str:
    """Copy the wheel into the venv, the only folder that we write to; return its path there."""
    folder = f"{plan.venv.rstrip('/')}/wheels"
    _check(target, target.run(["mkdir", "-p", folder]), f"{folder} cannot be created")
    path = f"{folder}/{wheel.name}"
    target.upload(wheel, path)
    return path


def _pip_install(
    target: Target, plan: InstallPlan, wheel: str, extras: Sequence[str], say: OnLine, *, is_new: bool
) -> None:
    listed = ",".join(extras)
    say(f"installing prefixwise {__version__} with {listed}")
    command = [*_TO_STDERR, plan.venv_python, *_PIP, "install", "--progress-bar", "off"]
    _check(target, target.run([*command, *plan.pip_args, f"{wheel}[{listed}]"], say), "pip install failed")
    if not is_new:
        # pip skips an installed package of the same version, though its code may differ.
        again = [*command, "--no-deps", "--no-index", "--force-reinstall", wheel]
        _check(target, target.run(again, say), "pip install failed")
    target.run(["rm", "-f", wheel])


def _check(target: Target, done: CommandResult, problem: str) -> None:
    if done.status != 0:
        raise TargetError(f"{target.name}: {problem}: {done.message}")


def _installed(target: Target, plan: InstallPlan, extras: Sequence[str], wheel: str) -> Installed:
    """Query the new interpreter. Raises TargetError."""
    done = target.run([plan.venv_python, "-I", "-c", _SCRIPT])
    _check(target, done, f"{plan.venv_python} cannot import prefixwise")
    version, file, prefix = json.loads(done.last_line)
    if version != __version__ or not file.startswith(prefix):
        raise TargetError(f"{target.name}: expected prefixwise {__version__} in {prefix}, got {version} in {file}")
    return Installed(version, f"{prefix}/bin/python", file, tuple(extras), wheel)


_SETUPTOOLS = 77  # as in pyproject.toml


def source_root() -> Path | None:
    """The source tree that this package runs from; None if it was installed from a wheel."""
    root = Path(_version.__file__).resolve().parents[1]
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return None
    return root if project.get("name") == "prefixwise" else None


def build_wheel(root: Path, scratch: Path, on_line: OnLine | None = None) -> Path:
    """Build in a copy of the source, because a build leaves files there that the next would use. Raises TargetError."""
    source, output = scratch / "source", scratch / "wheel"
    _copy_source(root, source)
    isolation = ["--no-build-isolation"] if _has_setuptools() else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", *isolation]
    done = run_streamed([*command, "--wheel-dir", str(output), str(source)], on_line)
    wheels = list(output.glob("*.whl"))
    if done.status != 0 or len(wheels) != 1:
        remedy = f" (run {sys.executable} -m ensurepip)" if "No module named pip" in done.stderr else ""
        raise TargetError(f"the wheel of {root} cannot be built: {done.message}{remedy}")
    return wheels[0]


def pack_installed(output: Path) -> Path:
    """Pack the files of the installed package into a wheel again. Raises TargetError."""
    try:
        installed = distribution("prefixwise")
    except PackageNotFoundError:
        raise TargetError("expected an installed prefixwise or a checkout, got neither") from None
    files = [each for each in installed.files or () if _is_of_the_wheel(each.parts)]
    if not any(each.parts == ("prefixwise", "_version.py") for each in files):
        raise TargetError("the installed prefixwise has no list of its files (RECORD): install it again from a wheel")
    output.mkdir(parents=True)
    path = output / _wheel_name(installed)
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        for each in files:
            wheel.write(str(each.locate()), str(each))
    return path


def _is_of_the_wheel(parts: tuple[str, ...]) -> bool:
    """True except for files that an installer adds: scripts, bytecode and metadata. pip does not check RECORD."""
    return (
        parts[0] != ".."
        and "__pycache__" not in parts
        and parts[-1] not in ("INSTALLER", "REQUESTED", "direct_url.json")
    )


def _wheel_name(installed: Distribution) -> str:
    return f"prefixwise-{installed.version}-py3-none-any.whl"


def _copy_source(root: Path, destination: Path) -> None:
    """Copy the package and the files that pyproject.toml refers to."""
    destination.mkdir(parents=True)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / file, destination / file)
    shutil.copytree(root / "prefixwise", destination / "prefixwise", ignore=shutil.ignore_patterns("__pycache__"))


def _has_setuptools() -> bool:
    """True if the build needs no other setuptools from an index."""
    try:
        return int(version("setuptools").partition(".")[0]) >= _SETUPTOOLS
    except (PackageNotFoundError, ValueError):
        return False
