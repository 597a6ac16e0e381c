from __future__ import annotations

import json

import pytest

from itemwise.cli.ops.doctor import doctor
from itemwise.ops.doctor.diagnosis import Check, Wanted
from itemwise.ops.targets.base import Target
from tests.cli.verb_runner import run_verb


def test_a_good_machine_is_ready(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is found to be good, tests/ops shows."""
    asked: list[tuple[str, Wanted]] = []

    def diagnose(target: Target, wanted: Wanted) -> list[Check]:
        asked.append((target.name, wanted))
        return [Check("reachable", "ok", "it runs commands"), Check("disk", "unknown")]

    monkeypatch.setattr("itemwise.ops.doctor.diagnosis.diagnose", diagnose)
    flags = ("--model", "embedded", "--artifact-root", "runs", "--min-free-gb", "0.5", "--port", "30010")
    ran = run_verb(doctor, capsys, "--target", "ssh://me@host", "--backend", "jax", *flags)
    assert ran.status == 0, ran.err
    assert asked == [("ssh://me@host", Wanted(None, "embedded", "jax", "", 30010, "runs", 0.5))]
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
    assert first == "target ssh://me@host: asking ~/.itemwise/venv/bin/python"
    assert header.split() == ["check", "state", "found", "what", "to", "do"]
    assert [row.split()[:2] for row in rows] == [["reachable", "ok"], ["disk", "unknown"]]


def test_what_is_lacking_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_verb(doctor, capsys, "--python", "/nonexistent", "--require-accelerator", "H100", "--min-free-gb", "0")
    answer = json.loads(ran.out)
    assert ran.status == 1
    assert not answer["ready"] and answer["lacks"] == ["itemwise"]
    assert answer["unknown"] == ["packages", "backend", "device", "accelerator"]
    (row,) = [line for line in ran.err.splitlines() if line.startswith("itemwise")]
    assert row.split()[1] == "lacks"
    assert row.endswith("itemwise ops install --target local, then --python ~/.itemwise/venv/bin/python")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--target", "ftp://host"), 1, "a target must be local, ssh://"),
        (("--backend", "mlx"), 2, "'mlx'"),
        (("--port", "70000"), 2, "'--port'"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_verb(doctor, capsys, *arguments)
    assert ran.status == status and ran.out == ""
    assert ran.err.startswith("error: ") and words in ran.err
