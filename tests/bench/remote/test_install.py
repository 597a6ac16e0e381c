"""This prefixwise into a venv of its own: over ssh, again, and from its installed files. No network is used."""

from __future__ import annotations

import shutil
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from prefixwise._version import __version__
from prefixwise.bench.remote import install as install_module
from prefixwise.bench.remote.install import (
    Installed,
    InstallPlan,
    _backend_extra,
    build_wheel,
    install_on,
    pack_installed,
    source_root,
)
from prefixwise.bench.remote.shell_facts import ShellFacts
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.remote.targets.gcloud import GcloudTpuTarget
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.ssh import SshTarget
from tests.bench.remote.bare_machine import bare_path, fake_python
from tests.bench.remote.ssh_server import SshServer

ROOT = Path(__file__).parents[3]
OFFLINE = ("--no-deps", "--no-index", "--no-compile")


@dataclass(frozen=True)
class Fresh:
    """An installation over ssh, and what was said while it was made."""

    plan: InstallPlan
    installed: Installed
    lines: list[str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, of the project."""
    root = source_root()
    assert root == ROOT
    return build_wheel(root, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def fresh(ssh: SshServer, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    plan = InstallPlan(venv=f"{tmp_path_factory.mktemp('install')}/a venv", pip_args=OFFLINE)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", ssh.environment["PATH"])
        patch.setattr("prefixwise.bench.remote.install.build_wheel", lambda root, scratch: wheel)
        target = SshTarget.parse(ssh.address.removeprefix("ssh://"))
        yield Fresh(plan, install_on(target, plan, lines.append), lines)


def in_venv(fresh: Fresh, question: str) -> str:
    """Of the interpreter there alone: PYTHONPATH does not count."""
    command = [fresh.installed.python, "-I", "-c", question]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_new_interpreter_runs_the_wheel(fresh: Fresh) -> None:
    assert fresh.installed.version == __version__
    assert fresh.installed.wheel == f"prefixwise-{__version__}-py3-none-any.whl"
    assert fresh.installed.extras == ("server", "harness", "torch")
    file = in_venv(fresh, "import prefixwise; print(prefixwise.__file__)")
    assert file == fresh.installed.file
    assert Path(file).is_relative_to(fresh.plan.venv) and not Path(file).is_relative_to(ROOT)


def test_the_wheel_has_its_data_files(fresh: Fresh) -> None:
    package = Path(fresh.installed.file).parent
    data = [
        each.relative_to(ROOT / "prefixwise")
        for kind in ("toml", "json")
        for each in ROOT.glob(f"prefixwise/**/*.{kind}")
    ]
    data += [each.relative_to(ROOT / "prefixwise") for each in ROOT.glob("prefixwise/web/static/*")]
    assert Path("web/static/index.html") in data
    assert Path("bench/known_models.toml") in data and Path("prompts/profiles/plain.toml") in data
    assert all((package / each).read_bytes() == (ROOT / "prefixwise" / each).read_bytes() for each in data)
    assert (package / "py.typed").exists()


def test_what_pip_says_is_passed_on(fresh: Fresh) -> None:
    assert fresh.lines[0].startswith("creating ")
    assert f"Successfully installed prefixwise-{__version__}" in fresh.lines


def test_doing_it_again_brings_it_up_to_date(fresh: Fresh) -> None:
    """Also where the version is the same, and the code is not."""
    changed = Path(fresh.installed.file).parent / "contract" / "errors.py"
    source = changed.read_text()
    changed.write_text(source + "\nBROKEN = True\n")
    own = Path(fresh.plan.venv, "lib", "kept.txt")
    own.write_text("mine")
    lines: list[str] = []
    again = install_on(LocalTarget(), fresh.plan, lines.append)
    assert lines[0].startswith(f"using {fresh.plan.venv}: Python 3.")
    assert again == fresh.installed
    assert changed.read_text() == source and own.read_text() == "mine"
    assert not list(Path(fresh.plan.venv, "wheels").iterdir())


def test_without_a_source_the_installed_files_are_the_wheel(
    fresh: Fresh, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an installer leaves them, with notes of its own. No index is asked. The venv has files that are not these."""
    site = tmp_path / "site"
    with ZipFile(wheel) as built:
        built.extractall(site)
        names = built.namelist()
    (info,) = site.glob("prefixwise-*.dist-info")
    record = info / "RECORD"
    added = ("prefixwise/__pycache__/scorer.pyc,,", f"{info.name}/INSTALLER,,", "../../bin/prefixwise,,")
    record.write_text("\n".join([record.read_text().strip(), *added]) + "\n")
    monkeypatch.setattr(install_module, "distribution", lambda name: PathDistribution(info))
    monkeypatch.setattr("prefixwise.bench.remote.install.source_root", lambda: None)
    lines: list[str] = []
    shutil.rmtree(Path(fresh.installed.file).parent / "contract")
    Path(fresh.installed.file).write_text("raise RuntimeError")
    installed = install_on(LocalTarget(), replace(fresh.plan, extras=("harness",)), lines.append)
    assert f"packing the wheel of the installed prefixwise {__version__}" in lines
    assert (installed.version, installed.wheel) == (__version__, wheel.name)
    root = Path(installed.file).parents[1]
    sources = [name for name in names if name.startswith("prefixwise/")]
    assert all((root / name).read_bytes() == (site / name).read_bytes() for name in sources)


def test_an_installation_without_a_list_of_its_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "METADATA").write_text(f"Name: prefixwise\nVersion: {__version__}\n")
    monkeypatch.setattr(install_module, "distribution", lambda name: PathDistribution(tmp_path))
    with pytest.raises(TargetError, match="has no list of its files"):
        pack_installed(tmp_path / "wheel")


def test_a_build_leaves_the_source_as_it_was(tmp_path: Path) -> None:
    """And takes in nothing that an earlier one has left."""
    root = tmp_path / "project"
    (root / "prefixwise").mkdir(parents=True)
    (root / "prefixwise" / "__init__.py").write_text("")
    (root / "prefixwise" / "_version.py").write_text(f'__version__ = "{__version__}"\n')
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (root / name).write_bytes((ROOT / name).read_bytes())
    (root / "build" / "lib" / "prefixwise").mkdir(parents=True)
    (root / "build" / "lib" / "prefixwise" / "stale.py").write_text("")
    before = sorted(root.rglob("*"))
    with ZipFile(build_wheel(root, tmp_path / "scratch")) as wheel:
        assert {name for name in wheel.namelist() if name.startswith("prefixwise/")} == {
            "prefixwise/__init__.py",
            "prefixwise/_version.py",
        }
    assert sorted(root.rglob("*")) == before


def test_a_python_without_pip_cannot_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    monkeypatch.setattr("sys.executable", str(tmp_path / "venv" / "bin" / "python"))
    with pytest.raises(TargetError, match=r"No module named pip .run .*python -m ensurepip"):
        build_wheel(ROOT, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("version", "has_venv", "words"),
    [
        (
            "3.11.2",
            False,
            r"python3 \(Python 3.11.2\) lacks venv and ensurepip: sudo apt install python3.11-venv",
        ),
        ("3.8.10", True, "expected Python 3.11 to 3.13, got python3 is Python 3.8.10: install one there"),
        ("", True, "expected Python 3.11 to 3.13, got no python3 that runs"),
    ],
)
def test_a_machine_that_can_make_no_venv_says_why(
    version: str, has_venv: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"python3": fake_python(version, has_venv=has_venv)} if version else {}
    monkeypatch.setenv("PATH", bare_path(tmp_path / "bin", **programs))
    with pytest.raises(TargetError, match=words):
        install_on(LocalTarget(), InstallPlan(venv=str(tmp_path / "venv")), lambda line: None)
    assert not (tmp_path / "venv").exists()


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(TargetError, match="exists and is not a virtual environment"):
        install_on(LocalTarget(), InstallPlan(venv=str(tmp_path)), lambda line: None)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]


def test_a_prefix_with_a_python_is_not_a_venv(tmp_path: Path) -> None:
    """As /usr and /opt/tool are: pip would change what others use."""
    prefix = Path(
        bare_path(tmp_path / "prefix" / "bin", python=f"touch {tmp_path}/ran\n{fake_python('3.12.1')}")
    ).parent
    before = sorted(prefix.rglob("*"))
    for place in (prefix, prefix / "bin" / "python"):
        with pytest.raises(TargetError, match=r"exists and is not a virtual environment|is not a folder"):
            install_on(LocalTarget(), InstallPlan(venv=str(place), pip_args=OFFLINE), lambda line: None)
    with pytest.raises(TargetError, match="/ exists and is not a virtual environment"):
        install_on(LocalTarget(), InstallPlan(venv="/", pip_args=OFFLINE), lambda line: None)
    assert sorted(prefix.rglob("*")) == before


def test_an_empty_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as far as making the venv; one with a hidden file in it is somebody's."""
    monkeypatch.setenv("PATH", bare_path(tmp_path / "bin", python3=fake_python("3.12.1")))
    (tmp_path / "venv").mkdir()
    lines: list[str] = []
    with pytest.raises(TargetError):
        install_on(LocalTarget(), InstallPlan(venv=f"{tmp_path}/venv"), lines.append)
    assert lines[0] == f"creating {tmp_path}/venv with python3, Python 3.12.1"
    (tmp_path / "venv" / ".hidden").write_text("mine")
    with pytest.raises(TargetError, match="exists and is not a virtual environment"):
        install_on(LocalTarget(), InstallPlan(venv=f"{tmp_path}/venv"), lines.append)


def test_a_venv_keeps_its_python(tmp_path: Path) -> None:
    bin_folder = Path(bare_path(tmp_path / "venv" / "bin", python=fake_python("3.12.1")))
    (tmp_path / "venv" / "pyvenv.cfg").write_text("version = 3.12.1\n")
    other = Path(bare_path(tmp_path / "other", python3=fake_python("3.13.0"))) / "python3"
    plan = InstallPlan(python=str(other), venv=str(bin_folder.parent))
    with pytest.raises(TargetError, match=r"has Python 3.12.1, expected Python 3.13.0: remove it, or choose another"):
        install_on(LocalTarget(), plan, lambda line: None)


def test_a_place_that_cannot_be_written_to_is_an_error() -> None:
    with pytest.raises(TargetError, match="/proc/venv cannot be created"):
        install_on(LocalTarget(), InstallPlan(venv="/proc/venv"), lambda line: None)


def test_a_tpu_gets_jax_and_other_machines_pytorch() -> None:
    tpu = GcloudTpuTarget("my-tpu", "project", "zone")
    with_files = ShellFacts(device_files=("/dev/accel0",))
    assert _backend_extra(tpu, "auto", ShellFacts()) == "jax-tpu"
    assert _backend_extra(LocalTarget(), "auto", with_files) == "jax-tpu"
    assert _backend_extra(LocalTarget(), "auto", ShellFacts(gpus=("NVIDIA L4",))) == "torch"
    assert _backend_extra(tpu, "jax", ShellFacts()) == "jax"
