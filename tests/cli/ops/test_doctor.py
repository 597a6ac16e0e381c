from __future__ import annotations

import json

import pytest

from prefixwise.bench.remote.doctor import Check, Requirements
from prefixwise.bench.remote.targets.base import Target
from prefixwise.bench.remote.targets.gcloud import GcloudGpuTarget, GcloudTpuTarget
from prefixwise.bench.remote.targets.ssh import SshTarget
from prefixwise.cli.ops.verbs import doctor
from tests.cli.verb_runner import run_verb

VARIABLES = ("PREFIXWISE_TARGET", "PROJECT", "TPU_NAME", "TPU_ZONE", "GPU_NAME", "GPU_ZONE")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Target]:
    """Those that would be asked."""
    targets: list[Target] = []

    def diagnose(target: Target, wanted: Requirements) -> list[Check]:
        targets.append(target)
        return []

    monkeypatch.setattr("prefixwise.bench.remote.doctor.diagnose", diagnose)
    return targets


def test_the_environment_names_the_machine_where_no_target_is_given(
    asked: list[Target], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "TPU_NAME" not in run_verb(doctor, capsys).err
    for name, value in {"PROJECT": "p", "TPU_NAME": "my-tpu", "TPU_ZONE": "z", "GPU_ZONE": "g"}.items():
        monkeypatch.setenv(name, value)
    ran = run_verb(doctor, capsys)
    assert "TPU_NAME is set and --target is not: the target is gcloud-tpu://my-tpu" in ran.err.splitlines()
    assert "TPU_NAME" not in run_verb(doctor, capsys, "--target", "local").err
    run_verb(doctor, capsys, "--project", "q", "--zone", "y")
    run_verb(doctor, capsys, "--target", "gcloud-gpu://vm", "--project", "q")
    monkeypatch.setenv("PREFIXWISE_TARGET", "ssh://host")
    assert "TPU_NAME" not in run_verb(doctor, capsys).err
    assert asked == [
        asked[0],
        GcloudTpuTarget("my-tpu", "p", "z"),
        asked[2],
        GcloudTpuTarget("my-tpu", "q", "y"),
        GcloudGpuTarget("vm", "q", "g"),
        SshTarget("host"),
    ]
    assert [target.name for target in asked[0:3:2]] == ["local", "local"]


def test_a_good_machine_is_ready(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is found to be good, tests/bench/remote shows."""
    asked: list[tuple[str, Requirements]] = []

    def diagnose(target: Target, wanted: Requirements) -> list[Check]:
        asked.append((target.name, wanted))
        return [Check("reachable", "ok", "it runs commands"), Check("disk", "unknown")]

    monkeypatch.setattr("prefixwise.bench.remote.doctor.diagnose", diagnose)
    flags = ("--model", "embedded", "--artifact-root", "runs", "--min-free-gb", "0.5", "--port", "30010")
    ran = run_verb(doctor, capsys, "--target", "ssh://me@host", "--backend", "jax", *flags)
    assert ran.status == 0, ran.err
    assert asked == [("ssh://me@host", Requirements(None, "embedded", "jax", "", 30010, "runs", 0.5))]
    assert json.loads(ran.out) == {
        "target": "ssh://me@host",
        "ready": True,
        "lacks": [],
        "unknown": ["disk"],
        "checks": [
            {"name": "reachable", "state": "ok", "found": "it runs commands", "remedy": ""},
            {"name": "disk", "state": "unknown", "found": "", "remedy": ""},
        ],
    }
    first, header, *rows = ran.err.splitlines()
    assert first == "target ssh://me@host: querying ~/.prefixwise/venv/bin/python"
    assert header.split() == ["check", "state", "found", "what", "to", "do"]
    assert [row.split()[:2] for row in rows] == [["reachable", "ok"], ["disk", "unknown"]]


def test_what_is_lacking_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_verb(doctor, capsys, "--python", "/nonexistent", "--require-accelerator", "H100", "--min-free-gb", "0")
    answer = json.loads(ran.out)
    assert ran.status == 1
    assert not answer["ready"] and answer["lacks"] == ["prefixwise"]
    assert answer["unknown"] == ["packages", "backend", "device", "accelerator"]
    (row,) = [line for line in ran.err.splitlines() if line.startswith("prefixwise")]
    assert row.split()[1] == "lacks"
    assert row.endswith("prefixwise ops install --target local, then --python ~/.prefixwise/venv/bin/python")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--target", "ftp://host"), 1, "a target must be local, ssh://"),
        (("--backend", "mlx"), 2, "'mlx'"),
        (("--port", "70000"), 2, "'--port'"),
        (("--zone", "z"), 2, "--zone is for gcloud-tpu:// and gcloud-gpu:// targets, got the target local"),
        (("--project", "p", "--target", "ssh://host"), 2, "--project is for gcloud-tpu://"),
        (("--target", "gcloud-tpu://vm", "--project", "p"), 1, "gcloud-tpu://vm needs TPU_ZONE"),
        (("--target", "ssh://me:secret@host"), 1, "takes no password"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_verb(doctor, capsys, *arguments)
    assert ran.status == status and ran.out == ""
    assert ran.err.startswith("error: ") and words in ran.err
