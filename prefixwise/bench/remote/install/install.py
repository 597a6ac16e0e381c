"""prefixwise onto a target: a wheel of what runs here, in a virtual environment of its own there.

    make or find the venv  ->  build the wheel here  ->  copy  ->  pip install  ->  ask the new interpreter

Only the venv is written to. Doing it again brings what is there up to date.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixwise._version import __version__
from prefixwise.bench.remote.doctor.bare import BASE_NAMES, WANTED, BareFacts, Interpreter, ask_bare
from prefixwise.bench.remote.doctor.checkup import VENV
from prefixwise.bench.remote.install.wheel import build_wheel, pack_installed, source_root
from prefixwise.bench.remote.targets.base import Done, OnLine, Target, TargetError

COMMON_EXTRAS = ("server", "harness")
BACKEND_EXTRAS = ("torch", "jax", "jax-cuda", "jax-tpu")
# Isolated: what PYTHONPATH or the working folder adds is neither installed nor a reason not to install it.
_PIP = ("-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
_QUESTION = "import prefixwise, json, sys; print(json.dumps([prefixwise.__version__, prefixwise.__file__, sys.prefix]))"
# pip tells its progress on stdout, and targets pass on stderr.
_TO_STDERR = ("sh", "-c", '"$@" 1>&2', "sh")
# Status 0 where $1 is something, and no venv: a prefix with a Python in it would be the system's, or another's.
_IS_ANOTHER_THING = """
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

    python: str | None = None  # the base interpreter; the first that fits where it is not given
    venv: str = VENV
    backend: str = "auto"  # auto, or one of BACKEND_EXTRAS
    extras: tuple[str, ...] = ()  # these alone, where they are given
    system_site_packages: bool = False
    pip_args: tuple[str, ...] = ()

    @property
    def venv_python(self) -> str:
        return f"{self.venv.rstrip('/')}/bin/python"


@dataclass(frozen=True)
class Installed:
    """What stands now."""

    version: str
    python: str  # the path of the interpreter, for --python
    file: str  # of the package
    extras: tuple[str, ...]
    wheel: str  # its file name


def install_on(target: Target, plan: InstallPlan, say: OnLine) -> Installed:
    """Raises TargetError."""
    target.check_reachable()
    bare = ask_bare(target, plan.venv, [plan.venv_python, *([plan.python] if plan.python else [])])
    if bare.complaint:
        raise TargetError(f"{target.name}: {plan.venv} cannot be made: {bare.complaint}")
    extras = plan.extras or (*COMMON_EXTRAS, _backend_extra(target, plan.backend, bare))
    is_new = _make_venv(target, plan, bare, say)
    with tempfile.TemporaryDirectory(prefix="prefixwise-wheel-") as scratch:
        wheel = _wheel(Path(scratch), say)
        _pip_install(target, plan, _send(target, plan, wheel), extras, say, is_new=is_new)
    return _installed(target, plan, extras, wheel.name)


def _backend_extra(target: Target, backend: str, bare: BareFacts) -> str:
    """A TPU is JAX's alone; elsewhere PyTorch runs on what there is, CPU or GPU."""
    if backend != "auto":
        return backend
    is_tpu = target.name.startswith("gcloud-tpu://") or any(each.startswith("/dev/accel") for each in bare.device_files)
    return "jax-tpu" if is_tpu else "torch"


def _wheel(scratch: Path, say: OnLine) -> Path:
    root = source_root()
    if root is None:
        say(f"packing the wheel of the installed prefixwise {__version__}")
        return pack_installed(scratch / "wheel")
    say(f"building the wheel of {root}")
    return build_wheel(root, scratch)


def _make_venv(target: Target, plan: InstallPlan, bare: BareFacts, say: OnLine) -> bool:
    """True where it is new. One that works is kept. Raises TargetError."""
    there = bare.interpreter(plan.venv_python)
    if target.run(["sh", "-c", _IS_ANOTHER_THING, "sh", plan.venv]).status == 0:
        raise TargetError(f"{target.name}: {plan.venv} is there and is no virtual environment: choose another --venv")
    if there is not None:
        _check_same(target, plan, there, bare)
        if not plan.system_site_packages and target.run([plan.venv_python, *_PIP, "--version"]).status == 0:
            say(f"{plan.venv} is there: {there.title}")
            return False
    base = _base(target, plan, bare)
    say(f"making {plan.venv} with {base.path}, {base.title}")
    flags = ("--system-site-packages",) if plan.system_site_packages else ()
    done = target.run([*_TO_STDERR, base.path, "-I", "-m", "venv", *flags, plan.venv], say)
    if done.status != 0:
        raise TargetError(f"{target.name}: {base.path} -m venv failed: {done.words}")
    return there is None


def _check_same(target: Target, plan: InstallPlan, there: Interpreter, bare: BareFacts) -> None:
    """A venv stays with the Python that it was made with. Raises TargetError."""
    given = bare.interpreter(plan.python) if plan.python else None
    if not there.fits or (given is not None and given.version != there.version):
        wanted = given.title if given is not None and given.fits else f"Python {WANTED}"
        raise TargetError(
            f"{target.name}: {plan.venv} has {there.title}, expected {wanted}: remove it, or choose another --venv"
        )


def _base(target: Target, plan: InstallPlan, bare: BareFacts) -> Interpreter:
    """Raises TargetError where none can make a venv."""
    names: Sequence[str] = (plan.python,) if plan.python else BASE_NAMES
    base = bare.base(names)
    if base is None:
        there = ", ".join(f"{each.path} is {each.title}" for each in bare.interpreters if each.path in names)
        remedy = "install one there (sudo apt install python3.11 python3.11-venv), or name one with --python"
        raise TargetError(
            f"{target.name}: expected Python {WANTED}, got {there or f'no {names[0]} that runs'}: {remedy}"
        )
    if not base.has_venv:
        package = f"python{base.version[0]}.{base.version[1]}-venv"
        raise TargetError(
            f"{target.name}: {base.path} ({base.title}) comes without venv and ensurepip: sudo apt install {package}"
        )
    return base


def _send(target: Target, plan: InstallPlan, wheel: Path) -> str:
    """Where it is then: in the venv, as nothing else there is ours."""
    folder = f"{plan.venv.rstrip('/')}/wheels"
    _checked(target, target.run(["mkdir", "-p", folder]), f"{folder} cannot be made")
    place = f"{folder}/{wheel.name}"
    target.upload(wheel, place)
    return place


def _pip_install(
    target: Target, plan: InstallPlan, wheel: str, extras: Sequence[str], say: OnLine, *, is_new: bool
) -> None:
    listed = ",".join(extras)
    say(f"installing prefixwise {__version__} with {listed}")
    command = [*_TO_STDERR, plan.venv_python, *_PIP, "install", "--progress-bar", "off"]
    _checked(target, target.run([*command, *plan.pip_args, f"{wheel}[{listed}]"], say), "pip install failed")
    if not is_new:
        # pip keeps an installed package of the same version, though its code may differ.
        again = [*command, "--no-deps", "--no-index", "--force-reinstall", wheel]
        _checked(target, target.run(again, say), "pip install failed")
    target.run(["rm", "-f", wheel])


def _checked(target: Target, done: Done, words: str) -> None:
    if done.status != 0:
        raise TargetError(f"{target.name}: {words}: {done.words}")


def _installed(target: Target, plan: InstallPlan, extras: Sequence[str], wheel: str) -> Installed:
    """As the new interpreter says it. Raises TargetError."""
    done = target.run([plan.venv_python, "-I", "-c", _QUESTION])
    _checked(target, done, f"{plan.venv_python} has no prefixwise that can be imported")
    version, file, prefix = json.loads(done.last_line)
    if version != __version__ or not file.startswith(prefix):
        raise TargetError(f"{target.name}: expected prefixwise {__version__} in {prefix}, got {version} in {file}")
    return Installed(version, f"{prefix}/bin/python", file, tuple(extras), wheel)
