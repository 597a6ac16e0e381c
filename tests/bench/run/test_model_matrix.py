"""The parts of the model matrix that need no server; with servers it is in tests/cli/validate/test_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwise.bench.kinds.evaluation import EndpointEvaluation
from prefixwise.bench.kinds.gate_report import judge
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.options import EvaluationShape, GateBounds
from prefixwise.bench.run.model_matrix import MatrixPlan, ModelRun, Watcher, folder_name, multi_flags, row_of
from prefixwise.bench.run.validation import combine
from tests.bench.evaluations import MULTI_SCORES, multi_evaluation, serial_evaluation

PARITY = Parity(
    model="a-model",
    max_abs_diff_jax_serial_vs_torch_serial=0.01,
    max_abs_diff_jax_multi_vs_torch_serial=0.5,
    max_abs_diff_jax_multi_vs_torch_multi_semantic=0.015,
)


def test_a_folders_name_is_readable_and_of_one_model() -> None:
    assert folder_name("Qwen/Qwen3-0.6B").startswith("Qwen_Qwen3-0.6B-")
    assert len({folder_name(name) for name in ("a/b", "a_b", "/a/b", "a b", "../a/b")}) == 5
    assert all("/" not in folder_name(name) and folder_name(name)[0] != "." for name in ("../x", "/", ".."))


def test_the_multi_item_server_is_started_as_the_earlier_system_did() -> None:
    assert multi_flags(151643) == ("--multi-item-scoring-delimiter", "151643", "--disable-radix-cache")


def test_a_row_has_the_figures_and_passes_with_its_gates() -> None:
    combined = combine(multi_evaluation(), serial_evaluation(aligned=[[0.5, 0.5], [0.26, 0.74]]))
    report = judge(combined.model_dump(), PARITY.model_dump(), GateBounds())
    row = row_of("a-model", combined, PARITY, report, {"gate": "gate.json"})
    assert (row.status, row.reason) == ("pass", None)
    assert (row.same_length_isolation_max, row.changed_length_isolation_max) == (0.0, 0.0)
    assert row.delimiter_aligned_equivalence_max == pytest.approx(0.01)
    assert (row.jax_serial_vs_torch_serial_max, row.jax_multi_vs_torch_multi_semantic_max) == (0.01, 0.015)
    assert row.speedups == {"1": 1.0, "8": 3.0, "32": 6.0}


def test_a_row_that_fails_names_every_gate_that_does() -> None:
    combined = combine(multi_evaluation(), serial_evaluation())
    report = judge(combined.model_dump(), PARITY.model_dump(), GateBounds(speedup_items=7, max_parity=0.005))
    row = row_of("a-model", combined, PARITY, report, {})
    assert row.status == "fail"
    assert row.reason == (
        "speedup_n32_ge_3x: multi_vs_serial.performance.7.speedup_vs_serial_p50 is missing; "
        "jax_serial_vs_torch_serial_le_0p02: parity.max_abs_diff_jax_serial_vs_torch_serial is 0.01, expected <= 0.005"
    )


class TestWhatIsKept:
    """Which artifacts of an earlier run count as those of this one."""

    SHAPE = EvaluationShape()

    def plan(self, folder: Path, **more: object) -> MatrixPlan:
        return MatrixPlan(**{"output_dir": folder, "shape": self.SHAPE, "bounds": GateBounds(), **more})  # type: ignore[arg-type]

    def run(self, folder: Path, **more: object) -> ModelRun:
        def nothing(line: str) -> None: ...

        return ModelRun("a-model", self.plan(folder, **more), Watcher(nothing, lambda client: {}, nothing))

    def serial(self, run: ModelRun, **more: object) -> EndpointEvaluation:
        """As it would have been made with the defaults, of a model of 512 tokens."""
        flags = run._flags("serial", None)
        settings = {**self.SHAPE.settings(512), "server_flags": flags}
        return serial_evaluation(**{"labels": [0, 1], "delimiter": 511, "settings": settings, **more})  # type: ignore[arg-type]

    def test_the_same_plan_keeps_it(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        assert run._is_wanted(self.serial(run), "serial", None)

    @pytest.mark.parametrize(
        "change",
        [
            {"shape": EvaluationShape(timed_runs=6)},
            {"shape": EvaluationShape(item_counts=(1, 8))},
            {"labels": (510, 508)},
            {"delimiter": 500},
            {"server_flags": ("--dtype", "float32")},
        ],
    )
    def test_another_plan_does_not(self, tmp_path: Path, change: dict[str, object]) -> None:
        kept = self.serial(self.run(tmp_path))
        assert not self.run(tmp_path, **change)._is_wanted(kept, "serial", None)

    def test_bounds_do_not_matter(self, tmp_path: Path) -> None:
        kept = self.serial(self.run(tmp_path))
        assert self.run(tmp_path, bounds=GateBounds(min_speedup=9))._is_wanted(kept, "serial", None)

    @pytest.mark.parametrize("change", [{"model": "another"}, {"settings": {}}, {"mode": "multi"}])
    def test_an_artifact_of_something_else_is_not_kept(self, tmp_path: Path, change: dict[str, object]) -> None:
        run = self.run(tmp_path)
        assert not run._is_wanted(self.serial(run, **change), "serial", None)

    def test_the_multi_item_one_must_be_of_the_serial_ones_tokens(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        serial = self.serial(run)
        settings = {**self.SHAPE.settings(512), "server_flags": run._flags("multi", serial)}
        multi = multi_evaluation(MULTI_SCORES, labels=[0, 1], delimiter=511, settings=settings)
        assert run._is_wanted(multi, "multi", serial)
        assert not run._is_wanted(multi, "multi", serial.model_copy(update={"labels": [1, 2]}))
