"""Files there and back through a real ssh, whatever they are called."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from prefixwise.bench.remote.targets.base import ConnectionLostError, TargetError
from prefixwise.bench.remote.targets.ssh import SshTarget
from tests.bench.remote.ssh_server import SshServer

NAMES = ["plain", "a b 'c' \"d\"", "$(touch PWNED)", "`touch PWNED`;touch PWNED", "a:b", "-rf", "*", "line\nbreak"]


@pytest.fixture
def target(our_ssh: SshServer) -> SshTarget:
    return SshTarget.parse(our_ssh.address.removeprefix("ssh://"))


def put(folder: Path, ssh: str) -> None:
    """A program `ssh` of these lines."""
    folder.mkdir()
    (folder / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
    (folder / "ssh").chmod(0o755)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_names_and_nothing_else(name: str, target: SshTarget, tmp_path: Path) -> None:
    there = tmp_path / "there" / name
    (there / "deep").mkdir(parents=True)
    source = tmp_path / name
    source.write_bytes(bytes(range(256)) * 1000)
    target.upload(source, str(there / name))
    assert (there / name).read_bytes() == source.read_bytes()
    (there / "deep" / name).write_text("x")
    target.download(str(there), tmp_path / "here" / name)
    fetched = tmp_path / "here" / name
    assert {str(each.relative_to(fetched)) for each in fetched.rglob("*")} == {name, "deep", f"deep/{name}"}
    assert (fetched / name).read_bytes() == source.read_bytes()
    assert [each.name for each in (tmp_path / "here").iterdir()] == [name]
    assert not list(tmp_path.rglob("PWNED")) and not (Path.home() / "PWNED").exists()


def test_a_file_comes_back_to_exactly_its_place(target: SshTarget, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    (tmp_path / "here").write_text("old")
    target.download(str(tmp_path / "link"), tmp_path / "here")
    assert (tmp_path / "here").read_text() == "1" and not (tmp_path / "here").is_symlink()


def test_a_home_is_the_targets(target: SshTarget) -> None:
    """Both ways, also of what stands right in it."""
    (entry,) = target.run(["sh", "-c", 'cd && mktemp -d "$PWD/.prefixwise test-XXXXXX"']).stdout.splitlines()
    try:
        assert Path(entry).parent == Path.home()
        target.upload(Path(__file__), f"~/{Path(entry).name}/up")
        target.download(f"~/{Path(entry).name}", Path(entry) / "here")
        assert (Path(entry) / "here" / "up").read_text() == Path(__file__).read_text()
    finally:
        target.run(["rm", "-r", entry])


def test_what_cannot_be_copied_is_told_in_the_words_of_that_side(target: SshTarget, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"nothing cannot be fetched: .*tar: \./nothing: .*No such file"):
        target.download(str(tmp_path / "nothing"), tmp_path / "here")
    with pytest.raises(TargetError, match=r"no/where cannot be written: .*(No such file|nonexistent)"):
        target.upload(Path(__file__), str(tmp_path / "no/where"))
    with pytest.raises(TargetError, match=r"absent cannot be read: No such file"):
        target.upload(tmp_path / "absent", str(tmp_path / "there"))
    assert not list(tmp_path.iterdir())


def test_a_file_where_a_folder_should_be_is_one_error(target: SshTarget, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetError, match=r"file/run cannot be written: .*(File exists|Not a directory)"):
        target.download(str(tmp_path / "run"), tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_is_full_here_is_told(target: SshTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_bytes(bytes(10_000_000))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tarfile.copyfileobj", full)
    with pytest.raises(TargetError, match="cannot be written: No space left on device"):
        target.download(str(tmp_path / "one"), tmp_path / "here")
    assert [each.name for each in tmp_path.iterdir()] == ["one"]


def test_a_run_under_way_can_be_fetched(target: SshTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tar has status 1 where a file grew while it was read, and the archive is whole."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server.log").write_text("one\n")
    put(
        tmp_path / "bin",
        f"tar -C {tmp_path} -cf - ./run; echo 'tar: ./run/server.log: file changed as we read it' >&2; exit 1",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    target.download(str(tmp_path / "run"), tmp_path / "here")
    assert (tmp_path / "here" / "server.log").read_text() == "one\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("echo Welcome", "expected a tar archive"),
        ("exit 1", "it ended with status 1 without a message"),
        ("cd {folder} && ln -s /etc/passwd evil && tar -cf - evil", "expected a tar archive that can be unpacked"),
        ("cd {folder} && touch evil && tar -cPf - ../bin/evil", "expected a tar archive that can be unpacked"),
    ],
)
def test_an_archive_that_is_none_or_leads_out_of_its_folder_is_refused(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "bin", line.format(folder=tmp_path / "bin"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(TargetError, match=words):
        SshTarget("host").download("~/run", tmp_path / "here")
    assert [each.name for each in tmp_path.iterdir()] == ["bin"]


def test_half_a_file_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the connection is cut, `cat` at the other end sees no more than an end."""
    put(tmp_path / "bin", 'for line; do :; done; head -c 5 | sh -c "$line"; exit 255')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(ConnectionLostError, match="5 bytes received, expected"):
        SshTarget("host").upload(Path(__file__), str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_a_lost_connection_is_told_in_the_words_of_ssh_alone(target: SshTarget, our_ssh: SshServer) -> None:
    def cut(line: str) -> None:
        if line == "ready":
            with suppress(psutil.NoSuchProcess):  # where one ends with another
                our_ssh.cut()

    command = ["sh", "-c", "echo 'chunk size 4: starting the server' >&2; echo ready >&2; cat"]
    with pytest.raises(ConnectionLostError) as caught:
        target.run(command, cut)
    assert "closed by remote host" in str(caught.value) or "client_loop" in str(caught.value)
    assert "ready" not in str(caught.value) and "starting" not in str(caught.value)


def test_lines_of_the_command_are_not_those_of_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "bin", "echo 'cp: a: Permission denied' >&2; echo 'warm-up 1' >&2; exit 255")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(ConnectionLostError, match=r"the connection was lost: ssh gives no reason$"):
        SshTarget("host").run(["true"])
    with pytest.raises(ConnectionLostError, match=r"warm-up 1$"):  # there nothing but ssh speaks
        SshTarget("host").check_reachable()


def test_a_host_that_does_not_answer_is_told_in_one_line(target: SshTarget) -> None:
    with pytest.raises(ConnectionLostError, match=r"lost: ssh: connect to host 127.0.0.1 port 1: Connection refused$"):
        SshTarget("127.0.0.1", target.user, 1).check_reachable()


@pytest.mark.parametrize("address", ["me:secret@host", "me:secret@host:22", "me:@host", ":secret@host"])
def test_a_password_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(TargetError, match="takes no password") as caught:
        SshTarget.parse(address)
    assert "secret" not in str(caught.value)


def test_addresses() -> None:
    assert SshTarget.parse("[::1]:22") == SshTarget("::1", None, 22)
    assert SshTarget.parse("me@[::1]") == SshTarget("::1", "me")
    for wrong in ("", "host:0", "host:70000", "-oProxyCommand=x", "-x@host", "a b"):
        with pytest.raises(TargetError, match="must be like ssh://user@host:22"):
            SshTarget.parse(wrong)
