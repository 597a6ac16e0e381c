"""Targets for real: this machine, and this machine over ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.remote.ssh_server import MISSING, SshServer, ssh_server


@pytest.fixture(scope="session")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """Skipped loudly where there is no OpenSSH server."""
    if MISSING is not None:
        pytest.skip(f"{MISSING} is not installed: apt-get install openssh-server openssh-client")
    with ssh_server(tmp_path_factory.mktemp("ssh") / "server") as server:
        yield server


@pytest.fixture
def our_ssh(ssh: SshServer, monkeypatch: pytest.MonkeyPatch) -> SshServer:
    """In this process `ssh` and `scp` are those of the test."""
    monkeypatch.setenv("PATH", ssh.environment["PATH"])
    return ssh


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of servers are not the user's."""
    monkeypatch.setenv("PREFIXWISE_HOME", str(tmp_path / "prefixwise_home"))
