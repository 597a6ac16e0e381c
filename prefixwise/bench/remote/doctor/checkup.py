"""The checks of `ops doctor`: pure functions of what was found out about a target, each with its own remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixwise._version import __version__
from prefixwise.bench.remote.doctor.bare import WANTED, BareFacts
from prefixwise.bench.remote.spec import ARTIFACT_ROOT, EMBEDDED
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.models.embedded import INSTALL_COMMAND

VENV = "~/.prefixwise/venv"  # where `ops install` puts prefixwise, and targets look for it
VENV_PYTHON = f"{VENV}/bin/python"
BACKENDS = ("jax", "torch")
# Modules of what a run on a target needs: prefixwise itself, and its extras `harness` and `server`.
PACKAGES = (
    *("numpy", "tokenizers", "huggingface_hub", "gguf", "jinja2", "rich", "typer"),
    *("httpx", "pydantic"),
    *("httptools", "orjson", "prometheus_client", "starlette", "uvicorn", "uvloop"),
)

State = Literal["ok", "lacks", "unknown"]


@dataclass(frozen=True)
class Check:
    """One thing that a target must have."""

    name: str
    state: State
    found: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a run is going to need."""

    python: str | None = None
    model: str = ""
    backend: str = "auto"  # auto, jax, torch
    accelerator: str = ""  # part of a device's name
    port: int = 0
    artifact_root: str = ARTIFACT_ROOT
    min_free_gb: float = 5.0

    @property
    def backends(self) -> tuple[str, ...]:
        return BACKENDS if self.backend == "auto" else (self.backend,)


@dataclass(frozen=True)
class Inside:
    """What the interpreter has."""

    version: str | None  # of prefixwise
    file: str | None
    packages: frozenset[str]  # of PACKAGES and BACKENDS

    @property
    def missing(self) -> list[str]:
        return [name for name in PACKAGES if name not in self.packages]

    @property
    def can_answer(self) -> bool:
        """Does its agent start, and speak as we do?"""
        return self.version == __version__ and not self.missing


@dataclass
class Findings:
    """Of one target; None is what was not asked, as what had to come before it failed."""

    target: str
    python: str
    unreachable: str | None = None
    bare: BareFacts | None = None
    inside: Inside | None = None
    inside_problem: str = ""  # why the interpreter, or its agent, does not answer
    facts: Mapping[str, Any] | None = None

    def install(self, backend: str = "") -> str:
        """The command that mends most things."""
        base = None if self.bare is None else self.bare.base()
        chosen = f" --python {base.path}" if base is not None and base.path != "python3" else ""
        command = f"prefixwise ops install --target {self.target}{chosen}{f' --backend {backend}' if backend else ''}"
        return command if self.python == VENV_PYTHON else f"{command}, then --python {VENV_PYTHON}"


def all_checks(found: Findings, wanted: Wanted) -> list[Check]:
    """In the order in which one would mend things."""
    checks = [_reachable(found), _python(found), _disk(found, wanted), _folder(found)]
    checks += [_prefixwise(found), _packages(found), _backend(found, wanted), _device(found, wanted)]
    if wanted.accelerator:
        checks.append(_accelerator(found, wanted))
    checks.append(_port(found, wanted))
    if wanted.model:
        checks.append(_model(found, wanted))
    return checks


def require_accelerator(facts: Mapping[str, Any], name: str, backend: str = "auto") -> None:
    """`name` must be a part of the name that the backend has for a device; case does not count. Raises TargetError."""
    devices = _devices(facts, Wanted(backend=backend).backends)
    if not any(name.lower() in device.partition(": ")[2].lower() for device in devices):
        raise TargetError(f"expected an accelerator {name!r}, got {_counted(devices) or 'no device at all'}")


def _reachable(found: Findings) -> Check:
    if found.unreachable is None:
        return Check("reachable", "ok", f"it runs commands: {found.bare.system}" if found.bare else "")
    if found.target.startswith("ssh://"):
        remedy = f"make this work without a question: ssh {found.target} true"
    else:
        remedy = "is it running, in this project and zone? try: gcloud auth login"
    return Check("reachable", "lacks", found.unreachable, remedy)


def _python(found: Findings) -> Check:
    if found.bare is None:
        return Check("python", "unknown")
    own, base = found.bare.interpreter(found.python), found.bare.base()
    if own is not None:
        remedy = "" if own.fits else found.install()
        return Check("python", "ok" if own.fits else "lacks", f"{own.path} is {own.title}{_expected(own.fits)}", remedy)
    if base is None:
        there = ", ".join(f"{each.path} is {each.title}" for each in found.bare.interpreters) or "none"
        remedy = "sudo apt install python3.11 python3.11-venv, or what your system calls them"
        return Check("python", "lacks", f"{there}{_expected(fits=False)}", remedy)
    if not base.has_venv:
        package = f"python{base.version[0]}.{base.version[1]}-venv"
        remedy = f"sudo apt install {package}, or what your system calls it"
        return Check("python", "lacks", f"{base.path} is {base.title}, without venv and ensurepip", remedy)
    return Check("python", "ok", f"{base.path} is {base.title}: it can make a venv")


def _expected(fits: bool) -> str:
    return "" if fits else f", expected {WANTED}"


def _disk(found: Findings, wanted: Wanted) -> Check:
    if found.bare is None or found.bare.free_bytes is None:
        return Check("disk", "unknown")
    free = found.bare.free_bytes / 1e9
    words = f"{free:.1f} GB free in {found.bare.place}"
    if free >= wanted.min_free_gb:
        return Check("disk", "ok", words)
    remedy = "make room, or name another place with --artifact-root"
    return Check("disk", "lacks", f"{words}, expected {wanted.min_free_gb:g}", remedy)


def _folder(found: Findings) -> Check:
    if found.bare is None:
        return Check("folder", "unknown")
    if not found.bare.complaint:
        return Check("folder", "ok", f"{found.bare.place} can be written to")
    return Check("folder", "lacks", found.bare.complaint, "name another place with --artifact-root, or change its mode")


def _prefixwise(found: Findings) -> Check:
    if found.bare is None:
        return Check("prefixwise", "unknown")
    if found.inside is None or found.inside.version is None:
        words = found.inside_problem or f"{found.python} has none"
        return Check("prefixwise", "lacks", words, found.install())
    if found.inside.version != __version__:
        words = f"{found.inside.version} there, {__version__} here"
        return Check("prefixwise", "lacks", words, found.install())
    if found.inside_problem:
        return Check("prefixwise", "lacks", f"its agent does not answer: {found.inside_problem}", found.install())
    return Check("prefixwise", "ok", f"{found.inside.version} in {found.inside.file}")


def _packages(found: Findings) -> Check:
    if found.inside is None:
        return Check("packages", "unknown")
    missing = found.inside.missing
    if not missing:
        return Check("packages", "ok", "all of the server and the harness")
    remedy = found.install() if found.python == VENV_PYTHON else f"{found.python} -m pip install {' '.join(missing)}"
    return Check("packages", "lacks", f"without {', '.join(missing)}", remedy)


def _backend(found: Findings, wanted: Wanted) -> Check:
    if found.inside is None:
        return Check("backend", "unknown")
    there = [name for name in wanted.backends if name in found.inside.packages]
    if there:
        return Check("backend", "ok", ", ".join(there))
    choice = wanted.backend if wanted.backend != "auto" else ""
    return Check("backend", "lacks", f"without {' and '.join(wanted.backends)}", found.install(choice))


def _device(found: Findings, wanted: Wanted) -> Check:
    """A device that is there and not used is a lack: nobody wants to measure the host by mistake."""
    sure, hints = _hints(found.bare)
    if found.facts is None:
        return Check("device", "unknown", f"not asked for; there is {hints}" if hints else "")
    devices = _devices(found.facts, wanted.backends)
    problems = [f"{name}: {words}" for name, words in found.facts["device_problems"].items() if name in wanted.backends]
    words = "; ".join([*([_counted(devices)] if devices else []), *problems])
    if not devices:
        return Check("device", "lacks", words or "no backend names one", _for_devices(found, wanted))
    if all(device.endswith(": cpu") for device in devices) and hints:
        words += f", but there is {hints}"
        return Check("device", "lacks" if sure else "unknown", words, _for_devices(found, wanted))
    return Check("device", "ok", words)


def _hints(bare: BareFacts | None) -> tuple[bool, str]:
    """Are they sure, and in words. /dev/vfio may be another thing than a TPU."""
    if bare is None:
        return False, ""
    sure = bool(bare.gpus) or any(name.startswith("/dev/accel") for name in bare.device_files)
    return sure, ", ".join(dict.fromkeys([*bare.gpus, *bare.device_files]))


def _for_devices(found: Findings, wanted: Wanted) -> str:
    if wanted.backend == "torch":
        return (
            "a PyTorch that is built for the device: prefixwise ops install with --pip-args '--force-reinstall torch'"
        )
    is_gpu = found.bare is not None and bool(found.bare.gpus)
    return f"{found.install('jax-cuda' if is_gpu else 'jax-tpu')}; see that nothing else holds the device"


def _accelerator(found: Findings, wanted: Wanted) -> Check:
    if found.facts is None:
        return Check("accelerator", "unknown")
    try:
        require_accelerator(found.facts, wanted.accelerator, wanted.backend)
    except TargetError as error:
        return Check("accelerator", "lacks", str(error), "choose a target that has it, or see `device`")
    return Check("accelerator", "ok", f"{wanted.accelerator!r} is there")


def _port(found: Findings, wanted: Wanted) -> Check:
    if wanted.port == 0:
        return Check("port", "ok", "any that is free")
    if found.facts is None:
        return Check("port", "unknown")
    if found.facts["port_free"]:
        return Check("port", "ok", f"{wanted.port} is free")
    return Check("port", "lacks", f"{wanted.port} is taken", "--port 0 takes any that is free")


def _model(found: Findings, wanted: Wanted) -> Check:
    if found.facts is None:
        return Check("model", "unknown")
    words = found.facts["model"] or f"{wanted.model} is there"
    if found.facts["model_state"] != "missing":
        return Check("model", "ok", words)
    if wanted.model == EMBEDDED:
        remedy = f"on the target: {found.python} -m {INSTALL_COMMAND}"
    else:
        remedy = f"on the target: hf download {wanted.model} (HF_TOKEN where it is gated), or name a folder there"
    return Check("model", "lacks", words, remedy)


def _devices(facts: Mapping[str, Any], backends: Sequence[str]) -> list[str]:
    """`jax: TPU v6 lite`, of these backends."""
    return [device for device in facts["devices"] if device.partition(":")[0] in backends]


def _counted(devices: Sequence[str]) -> str:
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in Counter(devices).items())
