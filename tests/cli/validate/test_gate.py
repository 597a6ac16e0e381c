from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.gate_report import GateReport
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.run.check import read_checked
from prefixwise.contract.errors import ArtifactError
from tests.bench.kinds.samples import multi_vs_serial, parity
from tests.bench.kinds.test_gate_report import CHECKS
from tests.cli.conftest import Ran
from tests.cli.validate_program import result_of, run_validate

KINDS: dict[str, Any] = {"mvs": ("multi-vs-serial", MultiVsSerial), "parity": ("parity", Parity)}
SERIAL = [[0.5, 0.5], [0.2, 0.8]]


def combined_of(serial: list[list[float]] = SERIAL) -> Any:
    """Items that move by 0.05, and a speed-up of 4."""
    found = multi_vs_serial()
    found["equivalence_query_plus_delimiter"] = {
        "abs_diffs_multi_vs_serial_query_plus_delimiter": [0.0, 0.05],
        "max_abs_diff": 0.05,
        "mean_abs_diff": 0.025,
        "num_compared": 4,
        "serial_query_plus_delimiter_scores": serial,
    }
    found["isolation"] |= {
        "same_length_mutation_mean_abs_diff": 0.0,
        "changed_length_mutation_unchanged_diffs": [0.0, 0.02],
        "changed_length_mutation_max_abs_diff": 0.02,
        "changed_length_mutation_mean_abs_diff": 0.01,
    }
    found["performance"]["32"] |= {"speedup_vs_serial_p95": 4.0}
    found["performance"]["8"] = {"speedup_vs_serial_p50": 1.5, "multi_p50_sec": 2.0, "serial_p50_sec": 3.0}
    return found


def parity_of() -> Any:
    """Scores that are 0.01 from the reference."""
    return parity() | {
        "jax_serial_scores": [[0.49, 0.51]],
        "abs_diff_jax_serial_vs_torch_serial": [0.01],
        "max_abs_diff_jax_serial_vs_torch_serial": 0.01,
        "mean_abs_diff_jax_serial_vs_torch_serial": 0.01,
        "mean_abs_diff_jax_multi_vs_torch_multi_semantic": 0.0,
    }


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    write(tmp_path, "mvs", multi_vs_serial())
    write(tmp_path, "parity", parity())


def write(folder: Path, name: str, content: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def run(folder: Path, *args: object) -> Ran:
    files = ("--multi-vs-serial-json", folder / "mvs.json", "--parity-json", folder / "parity.json")
    return run_validate("gate", *files, *args)


def test_within_the_bounds_all_pass(tmp_path: Path) -> None:
    ran = run(tmp_path, "--output-json", tmp_path / "gate.json")
    found = result_of(ran)
    assert (ran.status, found["all_pass"], list(found["checks"])) == (0, True, list(CHECKS))
    assert GateReport.model_validate(found) == read_artifact(tmp_path / "gate.json", GateReport)
    header, *rows = ran.err.splitlines()
    assert header.split() == ["gate", "value", "bound", "result"]
    assert rows[3].split() == ["speedup_n32_ge_3x", "4.00", ">=", "3", "pass"]
    assert [row.split()[-1] for row in rows] == ["pass"] * 5


def test_one_over_its_bound_fails_and_is_named(tmp_path: Path) -> None:
    far = {"jax_serial_scores": [[0.47, 0.53]], "abs_diff_jax_serial_vs_torch_serial": [0.03]}
    write(tmp_path, "parity", parity() | far | {"max_abs_diff_jax_serial_vs_torch_serial": 0.03})
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
    without = multi_vs_serial()
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
    write(tmp_path, "mvs", combined_of())
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


def figures(content: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all numbers, except for the tokens that were scored."""
    if isinstance(content, dict | list):
        for key, each in content.items() if isinstance(content, dict) else enumerate(content):
            if key not in ("labels", "delimiter", "query_ids", "item_ids"):
                yield from figures(each, (*way, key))
    elif isinstance(content, int | float):
        yield way


def with_value(content: Any, way: tuple[str | int, ...], value: object) -> Any:
    changed = json.loads(json.dumps(content))
    place = changed
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    return changed


FORGED = [(name, way) for name, made in (("mvs", combined_of), ("parity", parity_of)) for way in figures(made())]


class TestForgedFiles:
    @pytest.fixture(autouse=True)
    def real(self, tmp_path: Path) -> None:
        write(tmp_path, "mvs", combined_of())
        write(tmp_path, "parity", parity_of())

    def test_without_a_forgery_they_are_judged(self, tmp_path: Path) -> None:
        checks = result_of(run(tmp_path))["checks"]
        found = {name: (check["value"], check["pass"]) for name, check in checks.items()}
        assert found == {
            "same_length_isolation_zero": (0.0, True),
            "changed_length_isolation_zero": (0.02, False),
            "delimiter_aligned_equiv_le_0p02": (pytest.approx(0.05), False),
            "speedup_n32_ge_3x": (4.0, True),
            "jax_serial_vs_torch_serial_le_0p02": (pytest.approx(0.01), True),
        }

    @pytest.mark.parametrize(("name", "way"), FORGED, ids=[".".join(map(str, way)) for _, way in FORGED])
    def test_every_figure_must_follow_from_the_others(
        self, tmp_path: Path, name: str, way: tuple[str | int, ...]
    ) -> None:
        content = combined_of() if name == "mvs" else parity_of()
        for value in (0.0, 0.0123, 7.5, -1.0, "0.0", float("nan")):
            forged = with_value(content, way, value)
            if forged == content:
                continue
            write(tmp_path, name, forged)
            with pytest.raises(ArtifactError, match=r"cannot be judged: .*expected .*, got ") as caught:
                read_checked(tmp_path / f"{name}.json", *KINDS[name])
            assert "\n" not in str(caught.value)

    def test_what_is_judged_is_computed_again(self, tmp_path: Path) -> None:
        """A figure that is off by less than the rounding that is allowed does not count."""
        moved = [0.0, 1e-13]
        isolation = {"changed_length_mutation_unchanged_diffs": moved, "changed_length_mutation_max_abs_diff": 0.0}
        content = combined_of()
        content["isolation"] |= isolation | {"changed_length_mutation_mean_abs_diff": 0.0}
        write(tmp_path, "mvs", content)
        check = result_of(run(tmp_path))["checks"]["changed_length_isolation_zero"]
        assert (check["value"], check["pass"]) == (1e-13, False)

    def test_the_error_is_one_line_and_nothing_is_judged(self, tmp_path: Path) -> None:
        write(tmp_path, "mvs", with_value(combined_of(), ("performance", "32", "speedup_vs_serial_p50"), 40.0))
        ran = run(tmp_path, "--output-json", tmp_path / "gate.json")
        assert (ran.status, ran.out, (tmp_path / "gate.json").exists()) == (1, "", False)
        assert ran.err == (
            f"error: {tmp_path / 'mvs.json'} cannot be judged: performance.32.speedup_vs_serial_p50: expected 4 "
            "(serial over multi), got 40; `bench check` says more\n"
        )

    def test_empty_lists_prove_nothing(self, tmp_path: Path) -> None:
        for way in (
            ("isolation", "same_length_mutation_unchanged_diffs"),
            ("performance", "32", "multi_latencies_sec"),
            ("equivalence", "abs_diffs_multi_vs_serial"),
        ):
            write(tmp_path, "mvs", with_value(combined_of(), way, []))
            assert run(tmp_path).err.startswith(f"error: {tmp_path / 'mvs.json'} cannot be judged: {'.'.join(way)}: ")
