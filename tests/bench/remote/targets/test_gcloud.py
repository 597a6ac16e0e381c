from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixwise.bench.remote.resources import ResourceOptions, create_command, delete_command, describe_command
from prefixwise.bench.remote.targets.base import ConnectionLostError, TargetError
from prefixwise.bench.remote.targets.gcloud import GcloudGpuTarget, GcloudTarget, GcloudTpuTarget
from tests.bench.remote.gcloud_stand_in import DENIED, NO_KEY_YET, REFUSED, TPU_MISSING, StandIn, stand_in

TPU = GcloudTpuTarget("vm", "p", "z")
GPU = GcloudGpuTarget("vm", "p", "z")
BOTH = pytest.mark.parametrize("target", [TPU, GPU], ids=["tpu", "gpu"])
SSH_OPTIONS = ["-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4", "-oConnectTimeout=20"]
PLACE = ["--zone=z", "--project=p", "--quiet"]


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(tmp_path / "gcloud", monkeypatch)


@pytest.mark.parametrize(
    ("target", "group"), [(TPU, ["compute", "tpus", "tpu-vm"]), (GPU, ["compute"])], ids=["tpu", "gpu"]
)
def test_the_command_lines_are_those_documented(target: GcloudTarget, group: list[str], gcloud: StandIn) -> None:
    source = gcloud.folder / "a:b"  # which gcloud would take for a machine, were it not absolute
    source.write_text("x")
    target.run(["true"])
    target.upload(source, "~/there")
    target.download("~/there", gcloud.folder / "back")
    ssh, up, move, down = gcloud.calls
    assert ssh[:-1] == [*group, "ssh", "vm", *PLACE, *(f"--ssh-flag={each}" for each in SSH_OPTIONS)]
    assert ssh[-1].startswith("--command=") and ssh[-1].endswith("; true")
    scp = [*group, "scp", "--recurse", *PLACE, *(f"--scp-flag={each}" for each in [*SSH_OPTIONS, "-p"])]
    assert up == [*scp, str(source), "vm:there.part"]
    assert move[-1].endswith("; mv -f ~/there.part ~/there")
    assert down[:-1] == [*scp, "vm:there"]
    assert Path(down[-1]).is_absolute()
    assert (gcloud.folder / "back").read_text() == "x"


def test_a_user_stands_before_the_name(gcloud: StandIn) -> None:
    target = GcloudTpuTarget("vm", "p", "z", "me")
    assert target.ssh_command("true")[5] == "me@vm"
    gcloud.answer("scp", {"status": 1})
    with pytest.raises(TargetError):
        target.upload(Path("/tmp/x"), "~/x")
    assert gcloud.calls[-1][-1] == "me@vm:x.part"


@BOTH
def test_a_command_runs_with_its_words_whole_and_its_lines_as_they_come(target: GcloudTarget, gcloud: StandIn) -> None:
    heard: list[str] = []
    done = target.run(["sh", "-c", 'echo "$1"; echo ~; echo one >&2; exit 3', "sh", "a  'b' $c;"], heard.append)
    assert (done.status, done.stdout) == (3, f"a  'b' $c;\n{gcloud.home}\n")
    assert heard == ["one"]


def test_a_home_is_the_vms(gcloud: StandIn) -> None:
    TPU.run(["mkdir", "-p", "~/a folder"])
    assert (gcloud.home / "a folder").is_dir()


@BOTH
def test_folders_come_back_whole(target: GcloudTarget, gcloud: StandIn, tmp_path: Path) -> None:
    (gcloud.home / "runs/one/deep").mkdir(parents=True)
    (gcloud.home / "runs/one/deep/a.json").write_text("1")
    target.download("~/runs/one", tmp_path / "here" / "two")
    assert (tmp_path / "here/two/deep/a.json").read_text() == "1"
    assert [each.name for each in (tmp_path / "here").iterdir()] == ["two"]


def test_what_is_not_there_cannot_be_fetched(gcloud: StandIn, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"vm:nothing cannot be copied .*No such file") as caught:
        TPU.download("~/nothing", tmp_path / "here")
    assert not isinstance(caught.value, ConnectionLostError)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("path", ["~/a b", "$(touch PWNED)", "a;b", "a'b", "a:b", "a*", "a\nb"])
def test_a_path_that_a_shell_could_read_otherwise_is_refused(path: str, gcloud: StandIn, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="a path for gcloud scp must contain only letters, digits and"):
        TPU.download(path, tmp_path / "here" / "run")
    with pytest.raises(TargetError, match="must contain only letters, digits and"):
        TPU.upload(Path(__file__), f"{path}/file")
    assert gcloud.calls == [] and not (tmp_path / "here").exists()


def test_a_file_where_a_folder_should_be_is_one_error(gcloud: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetError, match=r"file/run cannot be written: .*(File exists|Not a directory)"):
        TPU.download("~/run", tmp_path / "file" / "run")


def test_status_255_is_a_lost_connection_in_the_words_of_ssh(gcloud: StandIn) -> None:
    gcloud.answer("ssh", {"status": 255, "stderr": REFUSED})
    with pytest.raises(ConnectionLostError, match=r"port 22: Connection refused$"):
        GPU.check_reachable()
    gcloud.answer("scp", {"status": 255})
    with pytest.raises(ConnectionLostError):
        GPU.upload(Path("/tmp/x"), "~/x")


def test_a_key_that_is_not_there_yet_is_a_lost_connection_too(gcloud: StandIn) -> None:
    gcloud.answer("ssh", {"status": 1, "stderr": NO_KEY_YET})
    with pytest.raises(ConnectionLostError, match="Could not SSH"):
        GPU.run(["true"])


@pytest.mark.parametrize(("stderr", "words"), [(TPU_MISSING, "NOT_FOUND"), (DENIED, "Required 'compute.instances")])
def test_failures_of_gcloud_are_not_those_of_the_command(stderr: str, words: str, gcloud: StandIn) -> None:
    gcloud.answer("ssh", {"status": 1, "stderr": stderr})
    with pytest.raises(TargetError, match=words) as caught:
        TPU.run(["false"])
    assert not isinstance(caught.value, ConnectionLostError)
    assert TPU.run(["false"]).status == 1


def test_a_command_that_gcloud_repeats_after_a_cut_runs_once(gcloud: StandIn) -> None:
    gcloud.answer("ssh", {"cut": True})
    with pytest.raises(ConnectionLostError, match="while a command ran"):
        TPU.run(["sh", "-c", "echo ran >> ~/count"])
    assert (gcloud.home / "count").read_text() == "ran\n"
    assert TPU.run(["sh", "-c", "exit 254"]).status == 254, "a command may say what it likes"


def test_a_command_runs_where_its_token_cannot_be_written(gcloud: StandIn) -> None:
    (gcloud.home / ".prefixwise").write_text("a file is in the way")
    done = TPU.run(["echo", "ran"])
    assert (done.stdout, done.stderr) == ("ran\n", "")


def test_a_vm_without_gcloud_here_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match="gcloud cannot be run"):
        TPU.check_reachable()


def test_the_command_hears_when_we_are_gone(gcloud: StandIn) -> None:
    command = ["sh", "-c", "echo ready >&2; cat; touch ~/gone"]
    program = f"""
from prefixwise.bench.remote.targets.gcloud import GcloudTpuTarget
GcloudTpuTarget("vm", "p", "z").run({command!r}, lambda line: print(line, flush=True))
"""
    caller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        caller.wait(0.3)  # as it would end at once, were its stdin not open
    assert not (gcloud.home / "gone").exists()
    caller.kill()
    caller.wait()
    caller.stdout.close()
    tick = threading.Event()
    assert any((gcloud.home / "gone").exists() or tick.wait(0.02) for _ in range(500))


@pytest.mark.slow
def test_every_flag_is_in_the_help_of_gcloud(tmp_path: Path) -> None:
    """Offline: help is part of the program."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed: no flag was checked against its help")
    lines = [
        line
        for target in (TPU, GPU)
        for line in (
            target.ssh_command("true"),
            target.scp_command("/a", "vm:b"),
            create_command(target, ResourceOptions()),
            describe_command(target),
            delete_command(target),
        )
    ]
    with ThreadPoolExecutor(2) as pool:
        helps = list(pool.map(lambda line: _help(line, tmp_path), lines))
    for line, text in zip(lines, helps, strict=True):
        flags = {word.split("=", 1)[0] for word in line if word.startswith("--")}
        assert flags >= {"--zone", "--project", "--quiet"}
        assert flags <= set(re.findall(r"--[a-z][a-z-]*", text)), line


_OFFLINE = {
    "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
    "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
    "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
}


def _help(line: list[str], settings: Path) -> str:
    verb = next(index for index, word in enumerate(line) if word in ("ssh", "scp", "create", "describe", "delete"))
    environment = {**os.environ, **_OFFLINE, "CLOUDSDK_CONFIG": str(settings)}
    shown = subprocess.run([*line[: verb + 1], "--help"], env=environment, capture_output=True, text=True, check=True)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
