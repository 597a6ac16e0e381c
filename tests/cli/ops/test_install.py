from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwise._version import __version__
from prefixwise.bench.remote.install import BACKEND_EXTRAS, Installed, InstallPlan
from prefixwise.bench.remote.targets.base import OnLine, Target
from prefixwise.cli.ops.verbs import install
from tests.cli.verb_runner import run_verb


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFIXWISE_TARGET", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[InstallPlan]:
    """What would be installed: that it is, tests/bench/remote shows."""
    asked: list[InstallPlan] = []

    def install_on(target: Target, plan: InstallPlan, say: OnLine) -> Installed:
        asked.append(plan)
        say("Successfully installed prefixwise")
        return Installed(__version__, "/root/v/bin/python", "/root/v/prefixwise/__init__.py", ("server",), "a.whl")

    monkeypatch.setattr("prefixwise.bench.remote.install.install_on", install_on)
    return asked


def test_it_says_where_the_interpreter_is(plans: list[InstallPlan], capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_verb(install, capsys, "--venv", "~/v")
    assert ran.status == 0
    assert ran.err.splitlines() == [
        "target local: ~/v",
        "  Successfully installed prefixwise",
        f"prefixwise {__version__} on local: /root/v/bin/python",
        "use it with: --target local --python /root/v/bin/python",
    ]
    assert json.loads(ran.out) == {
        "target": "local",
        "version": __version__,
        "python": "/root/v/bin/python",
        "file": "/root/v/prefixwise/__init__.py",
        "extras": ["server"],
        "wheel": "a.whl",
    }


def test_where_it_is_looked_for_nothing_need_be_said(
    plans: list[InstallPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_verb(install, capsys, "--target", "ssh://me@host")
    assert plans == [InstallPlan()]
    assert "use it with" not in ran.err


def test_options_become_the_plan(plans: list[InstallPlan], capsys: pytest.CaptureFixture[str]) -> None:
    pip_args = "--pip-args=--index-url 'https://a b/' --pre"
    run_verb(install, capsys, "--python", "python3.12", "--extras", "server, jax-cuda", pip_args)
    run_verb(install, capsys, "--backend", "jax-tpu", "--system-site-packages")
    assert plans == [
        InstallPlan("python3.12", extras=("server", "jax-cuda"), pip_args=("--index-url", "https://a b/", "--pre")),
        InstallPlan(backend="jax-tpu", system_site_packages=True),
    ]


@pytest.mark.parametrize("backend", ["auto", *BACKEND_EXTRAS])
def test_every_extra_of_a_backend_can_be_chosen(
    backend: str, plans: list[InstallPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb(install, capsys, "--backend", backend).status == 0
    assert plans == [InstallPlan(backend=backend)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--extras", " , "), "--extras must be names"),
        (("--pip-args", "--index-url 'x"), "--pip-args cannot be split"),
        (("--backend", "mlx"), "'mlx'"),
        (("--venv", ""), "--venv must be a folder on the target, got ''"),
        (("--venv", " "), "--venv must be a folder on the target, got ' '"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], words: str, plans: list[InstallPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_verb(install, capsys, *arguments)
    assert ran.status == 2 and ran.out == "" and words in ran.err
    assert plans == []


def test_what_fails_is_an_error_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    ran = run_verb(install, capsys, "--venv", str(tmp_path))
    assert ran.status == 1 and ran.out == ""
    assert f"error: local: {tmp_path} exists and is not a virtual environment: choose another --venv" in ran.err
