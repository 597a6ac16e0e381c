"""`ops doctor`: what a target lacks, found before anything runs there.

    connection  ->  plain sh      ->  the interpreter    ->  the agent
    reachable       python            prefixwise             device, accelerator
                    disk, folder      packages, backend      port, model

A check whose input could not be read because an earlier step failed is `unknown`. The checks are pure functions of the
findings; each one that fails names its remedy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixwise._version import __version__
from prefixwise.bench.remote.agent_client import RemoteAgent
from prefixwise.bench.remote.shell_facts import WANTED, ShellFacts, read_shell_facts
from prefixwise.bench.remote.spec import ARTIFACT_ROOT, EMBEDDED
from prefixwise.bench.remote.targets.base import VENV_PYTHON, ConnectionLostError, Target, TargetError
from prefixwise.models.sources import EMBEDDED_INSTALL_COMMAND

BACKENDS = ("jax", "torch")
# Modules that a run on a target needs: those of prefixwise and of its extras `harness` and `server`.
PACKAGES = (
    *("numpy", "tokenizers", "huggingface_hub", "gguf", "httpx", "jinja2", "rich", "typer", "typing_extensions"),
    "pydantic",
    *("flask_swagger_ui", "httptools", "msgspec", "orjson", "prometheus_client"),
    *("starlette", "uvicorn", "uvloop", "zmq"),
)

State = Literal["ok", "lacks", "unknown"]


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    found: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Requirements:
    """What a run will need."""

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
class InterpreterFacts:
    """What the target's interpreter has installed."""

    version: str | None  # of prefixwise
    file: str | None
    packages: frozenset[str]  # of PACKAGES and BACKENDS

    @property
    def missing(self) -> list[str]:
        return [name for name in PACKAGES if name not in self.packages]

    @property
    def can_answer(self) -> bool:
        """True if its agent starts and has our version."""
        return self.version == __version__ and not self.missing


@dataclass
class Findings:
    """The findings about one target; None if an earlier step failed."""

    target: str
    python: str
    unreachable: str | None = None
    shell: ShellFacts | None = None
    interpreter: InterpreterFacts | None = None
    interpreter_problem: str = ""  # why the interpreter or its agent does not answer
    facts: Mapping[str, Any] | None = None

    def install(self, backend: str = "") -> str:
        """The install command, the remedy of most problems."""
        base = None if self.shell is None else self.shell.base()
        chosen = f" --python {base.path}" if base is not None and base.path != "python3" else ""
        command = f"prefixwise ops install --target {self.target}{chosen}{f' --backend {backend}' if backend else ''}"
        return command if self.python == VENV_PYTHON else f"{command}, then --python {VENV_PYTHON}"


def all_checks(found: Findings, wanted: Requirements) -> list[Check]:
    """All checks, in the order in which to fix them."""
    checks = [_reachable(found), _python(found), _disk(found, wanted), _folder(found)]
    checks += [_prefixwise(found), _packages(found), _backend(found, wanted), _device(found, wanted)]
    if wanted.accelerator:
        checks.append(_accelerator(found, wanted))
    checks.append(_port(found, wanted))
    if wanted.model:
        checks.append(_model(found, wanted))
    return checks


def require_accelerator(facts: Mapping[str, Any], name: str, backend: str = "auto") -> None:
    """Raises TargetError unless `name` is part of a device's name in the backend; case is ignored."""
    devices = _devices(facts, Requirements(backend=backend).backends)
    if not any(name.lower() in device.partition(": ")[2].lower() for device in devices):
        raise TargetError(f"expected an accelerator {name!r}, got {_counted(devices) or 'no device'}")


def _reachable(found: Findings) -> Check:
    if found.unreachable is None:
        return Check("reachable", "ok", f"commands run: {found.shell.system}" if found.shell else "")
    if found.target.startswith("ssh://"):
        remedy = f"make this work without a prompt: ssh {found.target} true"
    else:
        remedy = "check that it is running in this project and zone; try: gcloud auth login"
    return Check("reachable", "lacks", found.unreachable, remedy)


def _python(found: Findings) -> Check:
    if found.shell is None:
        return Check("python", "unknown")
    own, base = found.shell.interpreter(found.python), found.shell.base()
    if own is not None:
        remedy = "" if own.fits else found.install()
        return Check("python", "ok" if own.fits else "lacks", f"{own.path} is {own.title}{_expected(own.fits)}", remedy)
    if base is None:
        there = ", ".join(f"{each.path} is {each.title}" for each in found.shell.interpreters) or "none"
        remedy = "sudo apt install python3.11 python3.11-venv, or your system's packages"
        return Check("python", "lacks", f"{there}{_expected(fits=False)}", remedy)
    if not base.has_venv:
        package = f"python{base.version[0]}.{base.version[1]}-venv"
        remedy = f"sudo apt install {package}, or your system's package"
        return Check("python", "lacks", f"{base.path} is {base.title}, without venv and ensurepip", remedy)
    return Check("python", "ok", f"{base.path} is {base.title}, and can create a venv")


def _expected(fits: bool) -> str:
    return "" if fits else f", expected {WANTED}"


def _disk(found: Findings, wanted: Requirements) -> Check:
    if found.shell is None or found.shell.free_bytes is None:
        return Check("disk", "unknown")
    free = found.shell.free_bytes / 1e9
    summary = f"{free:.1f} GB free in {found.shell.folder}"
    if free >= wanted.min_free_gb:
        return Check("disk", "ok", summary)
    remedy = "free some space, or name another folder with --artifact-root"
    return Check("disk", "lacks", f"{summary}, expected {wanted.min_free_gb:g}", remedy)


def _folder(found: Findings) -> Check:
    if found.shell is None:
        return Check("folder", "unknown")
    if not found.shell.write_error:
        return Check("folder", "ok", f"{found.shell.folder} can be written to")
    return Check(
        "folder", "lacks", found.shell.write_error, "name another folder with --artifact-root, or change its mode"
    )


def _prefixwise(found: Findings) -> Check:
    if found.shell is None:
        return Check("prefixwise", "unknown")
    if found.interpreter is None or found.interpreter.version is None:
        problem = found.interpreter_problem or f"{found.python} has none"
        return Check("prefixwise", "lacks", problem, found.install())
    if found.interpreter.version != __version__:
        problem = f"{found.interpreter.version} there, {__version__} here"
        return Check("prefixwise", "lacks", problem, found.install())
    if found.interpreter_problem:
        return Check("prefixwise", "lacks", f"its agent does not answer: {found.interpreter_problem}", found.install())
    return Check("prefixwise", "ok", f"{found.interpreter.version} in {found.interpreter.file}")


def _packages(found: Findings) -> Check:
    if found.interpreter is None:
        return Check("packages", "unknown")
    missing = found.interpreter.missing
    if not missing:
        return Check("packages", "ok", "all packages of the server and the harness")
    remedy = found.install() if found.python == VENV_PYTHON else f"{found.python} -m pip install {' '.join(missing)}"
    return Check("packages", "lacks", f"missing: {', '.join(missing)}", remedy)


def _backend(found: Findings, wanted: Requirements) -> Check:
    if found.interpreter is None:
        return Check("backend", "unknown")
    there = [name for name in wanted.backends if name in found.interpreter.packages]
    if there:
        return Check("backend", "ok", ", ".join(there))
    choice = wanted.backend if wanted.backend != "auto" else ""
    return Check("backend", "lacks", f"missing: {' and '.join(wanted.backends)}", found.install(choice))


def _device(found: Findings, wanted: Requirements) -> Check:
    """A device that no backend uses is reported, so that nobody measures the host by mistake."""
    sure, hints = _hints(found.shell)
    if found.facts is None:
        return Check("device", "unknown", f"not queried; the machine has {hints}" if hints else "")
    devices = _devices(found.facts, wanted.backends)
    errors = found.facts["device_problems"].items()
    problems = [f"{name}: {error}" for name, error in errors if name in wanted.backends]
    summary = "; ".join([*([_counted(devices)] if devices else []), *problems])
    if not devices:
        return Check("device", "lacks", summary or "no backend finds one", _device_remedy(found, wanted))
    if all(device.endswith(": cpu") for device in devices) and hints:
        summary += f", but the machine has {hints}"
        return Check("device", "lacks" if sure else "unknown", summary, _device_remedy(found, wanted))
    return Check("device", "ok", summary)


def _hints(shell: ShellFacts | None) -> tuple[bool, str]:
    """Whether the hints are certain, and their text. /dev/vfio may belong to another device than a TPU."""
    if shell is None:
        return False, ""
    sure = bool(shell.gpus) or any(name.startswith("/dev/accel") for name in shell.device_files)
    return sure, ", ".join(dict.fromkeys([*shell.gpus, *shell.device_files]))


def _device_remedy(found: Findings, wanted: Requirements) -> str:
    if wanted.backend == "torch":
        return (
            "install a PyTorch built for the device: prefixwise ops install with --pip-args '--force-reinstall torch'"
        )
    is_gpu = found.shell is not None and bool(found.shell.gpus)
    return f"{found.install('jax-cuda' if is_gpu else 'jax-tpu')}; check that no other process uses the device"


def _accelerator(found: Findings, wanted: Requirements) -> Check:
    if found.facts is None:
        return Check("accelerator", "unknown")
    try:
        require_accelerator(found.facts, wanted.accelerator, wanted.backend)
    except TargetError as error:
        return Check("accelerator", "lacks", str(error), "choose a target that has it, or see the check `device`")
    return Check("accelerator", "ok", f"{wanted.accelerator!r} found")


def _port(found: Findings, wanted: Requirements) -> Check:
    if wanted.port == 0:
        return Check("port", "ok", "any free port")
    if found.facts is None:
        return Check("port", "unknown")
    if found.facts["port_free"]:
        return Check("port", "ok", f"{wanted.port} is free")
    return Check("port", "lacks", f"{wanted.port} is taken", "--port 0 uses any free port")


def _model(found: Findings, wanted: Requirements) -> Check:
    if found.facts is None:
        return Check("model", "unknown")
    summary = found.facts["model"] or f"{wanted.model} found"
    if found.facts["model_state"] != "missing":
        return Check("model", "ok", summary)
    if wanted.model == EMBEDDED:
        remedy = f"on the target: {found.python} -m {EMBEDDED_INSTALL_COMMAND}"
    else:
        remedy = f"on the target: hf download {wanted.model} (with HF_TOKEN if it is gated), or name a folder there"
    return Check("model", "lacks", summary, remedy)


def _devices(facts: Mapping[str, Any], backends: Sequence[str]) -> list[str]:
    """The devices of these backends, like `jax: TPU v6 lite`."""
    return [device for device in facts["devices"] if device.partition(":")[0] in backends]


def _counted(devices: Sequence[str]) -> str:
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in Counter(devices).items())


# For an interpreter that may not have prefixwise: standard library only.
_SCRIPT = """
import importlib.util, json, sys
def has(name):
    return importlib.util.find_spec(name) is not None
facts = {"packages": [name for name in sys.argv[1:] if has(name)], "version": None, "file": None}
if has("prefixwise"):
    import prefixwise
    facts["version"], facts["file"] = getattr(prefixwise, "__version__", None), prefixwise.__file__
print(json.dumps(facts))
"""


def diagnose(target: Target, wanted: Requirements) -> list[Check]:
    """Run all checks. An unreachable target is a failed check, not an exception."""
    found = Findings(target.name, wanted.python or target.default_python)
    try:
        target.check_reachable()
        found.shell = read_shell_facts(target, wanted.artifact_root, [found.python])
        _query_interpreter(target, found, wanted)
    except TargetError as error:
        found.unreachable = str(error)
    return all_checks(found, wanted)


def _query_interpreter(target: Target, found: Findings, wanted: Requirements) -> None:
    """Query the interpreter and its agent. Raises ConnectionLostError; any other failure is a finding."""
    try:
        found.interpreter = _interpreter_facts(target, found.python)
        if found.interpreter.can_answer:
            arguments = ("--folder", wanted.artifact_root, "--model", wanted.model, "--port", str(wanted.port))
            found.facts = RemoteAgent.on(target, found.python).call("facts", *arguments)
    except ConnectionLostError:
        raise
    except TargetError as error:
        found.interpreter_problem = str(error)


def _interpreter_facts(target: Target, python: str) -> InterpreterFacts:
    """Raises TargetError if the interpreter does not run."""
    done = target.run([python, "-c", _SCRIPT, *PACKAGES, *BACKENDS])
    if done.status != 0:
        raise TargetError(f"{python} does not run: {done.message}")
    try:
        facts = json.loads(done.last_line)
    except ValueError:
        raise TargetError(f"{python}: expected a line of JSON, got {done.last_line[:200]!r}") from None
    return InterpreterFacts(facts["version"], facts["file"], frozenset(facts["packages"]))
