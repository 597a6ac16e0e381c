from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from prefixwise.bench.remote.shell_facts import (
    OLDEST,
    TOO_NEW,
    Interpreter,
    ShellFacts,
    parse_shell_facts,
    read_shell_facts,
)
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.ssh import SshTarget
from tests.bench.remote.bare_machine import bare_path, fake_python
from tests.bench.remote.ssh_server import PYTHON, SshServer


def test_the_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}"


def test_a_machine_without_python_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", bare_path(tmp_path / "bin"))
    found = read_shell_facts(LocalTarget(), str(tmp_path / "reports" / "artifacts"), ["/nonexistent"])
    assert found.interpreters == () and found.base() is None
    assert found.folder == str(tmp_path) and found.write_error == ""
    assert found.free_bytes is not None and found.free_bytes > 0
    assert not list(tmp_path.glob(".prefixwise*"))  # what was tried is gone


def test_interpreters_and_gpus_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {
        "python3": fake_python("3.14.0rc1"),
        "python3.12": fake_python("3.12.3", has_venv=False),
        "python3.11": fake_python("3.11.2"),
        "nvidia_smi": "echo NVIDIA H200; echo NVIDIA H200",
    }
    monkeypatch.setenv("PATH", bare_path(tmp_path / "bin", **programs))
    found = read_shell_facts(LocalTarget(), str(tmp_path))
    assert found.interpreters == (
        Interpreter("python3", (3, 14), "Python 3.14.0rc1", True),
        Interpreter("python3.12", (3, 12), "Python 3.12.3", False),
        Interpreter("python3.11", (3, 11), "Python 3.11.2", True),
    )
    assert found.base() == found.interpreters[2]  # the first that can make a venv
    assert found.gpus == ("NVIDIA H200", "NVIDIA H200")


def test_an_nvidia_smi_that_fails_names_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "echo NVIDIA-SMI has failed because it could not talk to the driver; exit 9"
    monkeypatch.setenv("PATH", bare_path(tmp_path / "bin", nvidia_smi=script))
    assert read_shell_facts(LocalTarget(), str(tmp_path)).gpus == ()


@pytest.mark.parametrize("inside", ["", "/deeper/down"])
def test_a_folder_that_cannot_be_is_complained_of(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("")
    found = read_shell_facts(LocalTarget(), f"{tmp_path}/file{inside}")
    assert found.write_error == f"{tmp_path}/file is not a folder"


def test_a_folder_that_takes_no_files_is_complained_of() -> None:
    assert "/proc" in read_shell_facts(LocalTarget(), "/proc/reports").write_error  # also of root


def test_a_target_without_a_shell_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match="sh cannot be run"):
        read_shell_facts(LocalTarget(), str(tmp_path))


def test_the_same_over_ssh(our_ssh: SshServer, tmp_path: Path) -> None:
    found = read_shell_facts(SshTarget.parse(our_ssh.address.removeprefix("ssh://")), f"{tmp_path}/a b/c", [PYTHON])
    own = found.interpreter(PYTHON)
    assert own is not None and own.fits
    assert found.folder == str(tmp_path)


def test_lines_that_are_not_ours_are_passed_over() -> None:
    """Shells of users greet them."""
    assert parse_shell_facts("Welcome!\npython\t1\tbash: not found\tno\nplace\t/home\n") == ShellFacts(folder="/home")


@pytest.mark.parametrize(
    ("line", "free"),
    [
        ("/dev/sda1 102400 2400 100000 3% /", 100_000 * 1024),
        ("nfs:/a b 102400 2400 0 100% /mnt/my disk", 0),
        ("", None),
    ],
)
def test_free_room_is_the_fourth_word_of_df(line: str, free: int | None) -> None:
    assert parse_shell_facts(f"disk\t{line}\n").free_bytes == free
