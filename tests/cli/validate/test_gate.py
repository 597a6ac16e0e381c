from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.gate_report import GateReport
from tests.bench.kinds.test_gate_report import CHECKS, MULTI_VS_SERIAL, PARITY
from tests.cli.conftest import Ran
from tests.cli.validate_program import result_of, run_validate


@pytest.fixture(autouse=True)
def at_the_bounds(tmp_path: Path) -> None:
    write(tmp_path, "mvs", MULTI_VS_SERIAL)
    write(tmp_path, "parity", PARITY)


def write(folder: Path, name: str, content: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def run(folder: Path, *args: object) -> Ran:
    files = ("--multi-vs-serial-json", folder / "mvs.json", "--parity-json", folder / "parity.json")
    return run_validate("gate", *files, *args)


def test_at_the_bounds_all_pass(tmp_path: Path) -> None:
    ran = run(tmp_path, "--output-json", tmp_path / "gate.json")
    found = result_of(ran)
    assert (ran.status, found["all_pass"], list(found["checks"])) == (0, True, list(CHECKS))
    assert GateReport.model_validate(found) == read_artifact(tmp_path / "gate.json", GateReport)
    header, *rows = ran.err.splitlines()
    assert header.split() == ["gate", "value", "bound", "result"]
    assert rows[3].split() == ["speedup_n32_ge_3x", "3.00", ">=", "3", "pass"]
    assert [row.split()[-1] for row in rows] == ["pass"] * 5


def test_one_over_its_bound_fails_and_is_named(tmp_path: Path) -> None:
    write(tmp_path, "parity", {"max_abs_diff_jax_serial_vs_torch_serial": 0.03})
    ran = run(tmp_path)
    found = result_of(ran)
    assert (ran.status, found["all_pass"]) == (1, False)
    assert [name for name, check in found["checks"].items() if not check["pass"]] == [
        "jax_serial_vs_torch_serial_le_0p02"
    ]
    assert ran.err.splitlines()[-1] == (
        "jax_serial_vs_torch_serial_le_0p02: parity.max_abs_diff_jax_serial_vs_torch_serial is 0.03, expected <= 0.02"
    )


def test_a_missing_figure_fails_and_says_so(tmp_path: Path) -> None:
    without = deepcopy(MULTI_VS_SERIAL)
    del without["performance"]["32"]
    write(tmp_path, "mvs", without)
    ran = run(tmp_path)
    assert ran.status == 1
    assert result_of(ran)["checks"]["speedup_n32_ge_3x"]["value"] is None
    assert ran.err.splitlines()[-1] == (
        "speedup_n32_ge_3x: multi_vs_serial.performance.32.speedup_vs_serial_p50 is missing"
    )


def test_every_bound_is_an_option(tmp_path: Path) -> None:
    given = {
        "--max-same-length-isolation": 0.1,
        "--max-changed-length-isolation": 0.2,
        "--max-equivalence": 0.3,
        "--min-speedup": 1.5,
        "--max-parity": 0.5,
    }
    options = [word for option in given.items() for word in option]
    ran = run(tmp_path, *options, "--speedup-items", 8)
    checks = result_of(ran)["checks"]
    assert (ran.status, [check["bound"] for check in checks.values()]) == (0, list(given.values()))
    assert checks["speedup_n32_ge_3x"]["field"] == "multi_vs_serial.performance.8.speedup_vs_serial_p50"


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "parity.json").unlink()
    ran = run(tmp_path)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == f"error: {tmp_path / 'parity.json'} cannot be read: No such file or directory\n"
