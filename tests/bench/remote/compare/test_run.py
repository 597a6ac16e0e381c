"""The cross-backend runbook for real, small: JAX on this machine, PyTorch over ssh, the connection cut in mid-run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from prefixwise._version import __version__
from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.base import BackendName
from prefixwise.bench.kinds.score_matrix import ScoreMatrix
from prefixwise.bench.remote.agent_client import RemoteAgent
from prefixwise.bench.remote.compare.plan import MATRIX_STEPS, ComparePlan
from prefixwise.bench.remote.compare.run import CompareResult, CompareRun, CompareSide, check_facts
from prefixwise.bench.remote.sweep import Watcher
from prefixwise.bench.remote.targets.base import ConnectionLostError, TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.ssh import SshTarget
from prefixwise.bench.run.check import check_file
from prefixwise.contract.errors import ArtifactError
from tests.bench.remote.compare_samples import FACTS, small_plan, write_matrices
from tests.bench.remote.ssh_server import PYTHON, SshServer
from tests.bench.remote.test_sweep import wait_until

LOCAL = RemoteAgent.on(LocalTarget())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"prefixwise": "0.0.1"},
            f"local: expected prefixwise {__version__} as here, got 0.0.1 .run prefixwise ops install",
        ),
        ({"packages": {"jax": True}}, "local: torch is not installed for .*: pytorch needs it"),
        ({"is_writable": False}, "local: the folder for artifacts cannot be written"),
        ({}, "local, for pytorch: expected an accelerator 'H200'"),  # JAX sees one, PyTorch does not
    ],
)
def test_what_a_target_lacks_is_said(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        check_facts(CompareSide("pytorch", LOCAL, "H200"), {**FACTS, **facts})
    check_facts(CompareSide("jax", LOCAL, "h200"), FACTS)


SKIPPED = ["canonical workload", *(step.title for step in MATRIX_STEPS), "comparison", "report"]


@dataclass(frozen=True)
class Untouched:
    """A target that must not be asked for anything."""

    name: str = "local"
    default_python: str = "python"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{self.name} was asked to {name}")


def untouched(jax: str = "local", pytorch: str = "local") -> dict[BackendName, CompareSide]:
    names: dict[BackendName, str] = {"jax": jax, "pytorch": pytorch}
    return {each: CompareSide(each, RemoteAgent(cast(Any, Untouched(name)), "")) for each, name in names.items()}


def sides(pytorch: RemoteAgent = LOCAL) -> dict[BackendName, CompareSide]:
    return {"jax": CompareSide("jax", LOCAL), "pytorch": CompareSide("pytorch", pytorch)}


@dataclass
class Log:
    """What a run says."""

    steps: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    also: Callable[[str], None] = lambda line: None

    @property
    def watcher(self) -> Watcher:
        def line(text: str) -> None:
            self.lines.append(text)
            self.also(text)

        return Watcher(self.steps.append, line)


def run(
    plan: ComparePlan,
    where: dict[BackendName, CompareSide],
    here: Path,
    there: Path | None = None,
    log: Log | None = None,
) -> CompareResult:
    made = CompareRun(plan, where, here, str(there or here), (log or Log()).watcher)
    made.begin()
    return made()


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@dataclass
class Story:
    """A run that was cut, the same once more, and what they left."""

    plan: ComparePlan
    sides: dict[BackendName, CompareSide]
    here: Path
    there: Path
    cut: Log
    again: Log
    left: ScoreMatrix  # by the run that was cut, on the target
    files_between: dict[str, int]  # here
    result: CompareResult


@pytest.fixture(scope="module")
def story(
    ssh: SshServer, tmp_path_factory: pytest.TempPathFactory, checkpoint_of: Callable[[str], Path]
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("compare")
    here, there = folder / "here", folder / "there"
    plan = small_plan(checkpoint_of("qwen3"))
    cache = ("--compilation-cache-dir", str(folder / "programs"))  # the second server need not compile
    plan = replace(plan, jax_server_flags=(*plan.jax_server_flags, *cache))
    where = sides(RemoteAgent.on(SshTarget.parse(ssh.address.removeprefix("ssh://")), PYTHON))

    def cut_in_second_row(line: str) -> None:
        if line.endswith("sweep: chunk size 1") and (there / "pytorch_portable_matrix.json").exists():
            ssh.cut()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", ssh.environment["PATH"])
        patch.setenv("PREFIXWISE_HOME", str(folder / "prefixwise_home"))
        cut, again = Log(also=cut_in_second_row), Log()
        with pytest.raises(ConnectionLostError):
            run(plan, where, here, there, cut)
        wait_until(lambda: not list((ssh.prefixwise_home / "servers").glob("*.json")))  # it is noticed there, too
        left, between = read_artifact(there / "pytorch_portable_matrix.json", ScoreMatrix), times(here)
        result = run(plan, where, here, there, again)
        yield Story(plan, where, here, there, cut, again, left, between, result)


def test_a_run_that_is_cut_goes_on_from_the_rows_on_the_target(story: Story) -> None:
    assert story.cut.steps == [
        "canonical workload",
        f"targets: local, {story.sides['pytorch'].agent.target.name}",
        "jax portable matrix",
        "jax best-native matrix",
        "pytorch portable matrix",
    ]
    assert [row.client_chunk_size for row in story.left.results] == [6]
    done = read_artifact(story.here / "pytorch_portable_matrix.json", ScoreMatrix)
    assert done.results[0] == story.left.results[0], "measured once"
    assert [row.status for row in done.results] == ["ok", "ok"]
    assert story.again.steps == [
        "canonical workload: already done",
        f"targets: {story.sides['pytorch'].agent.target.name}",  # the other has nothing left to do
        "jax portable matrix: already done",
        "jax best-native matrix: already done",
        "pytorch portable matrix",
        "pytorch best-native matrix",
        "comparison",
        "report",
    ]
    assert any(line.endswith("pytorch_best_native: starting the server") for line in story.again.lines)
    now = times(story.here)
    assert {name for name, time in story.files_between.items() if now[name] != time} == {".compare_backends.json"}


def test_what_is_left_is_whole_and_says_who_won(story: Story) -> None:
    assert story.result.passed
    assert story.result.failed == ()
    names = {path.name for path in story.here.iterdir()}
    matrices = {f"{step.name}_matrix.{kind}" for step in MATRIX_STEPS for kind in ("json", "md")}
    others = {"canonical_workload.json", ".compare_backends.json", "comparison.json", "comparison.md", "logs"}
    assert names == matrices | others | {"report.md", "report.html"}
    for path in story.here.glob("*.json"):
        assert check_file(path).errors == (), path
    native = read_artifact(story.here / "jax_best_native_matrix.json", ScoreMatrix)
    assert (native.server_config["backend"], native.server_config["chunk_size"]) == ("jax", 64)
    assert read_artifact(story.here / "pytorch_portable_matrix.json", ScoreMatrix).server_config["chunk_size"] == 6


def test_a_second_run_recomputes_nothing_and_asks_no_target(story: Story) -> None:
    before, log = times(story.here), Log()
    names = {backend: side.agent.target.name for backend, side in story.sides.items()}
    result = run(story.plan, untouched(names["jax"], names["pytorch"]), story.here, story.there, log)
    assert list(result.skipped) == SKIPPED
    assert log.steps[1] == "targets: nothing left to measure"
    assert times(story.here) == before
    assert result.comparison == story.result.comparison


def test_only_what_was_changed_is_made_again(story: Story, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(story.here, copy)
    where = untouched("local", story.sides["pytorch"].agent.target.name)
    (copy / "report.md").unlink()
    assert list(run(story.plan, where, copy).skipped) == SKIPPED[:-1]
    matrix = copy / "jax_portable_matrix.json"
    matrix.write_text(matrix.read_text() + "\n")  # other bytes, the same matrix
    assert list(run(story.plan, where, copy).skipped) == SKIPPED[:-2]
    assert list(run(story.plan, where, copy).skipped) == SKIPPED


def test_other_arguments_into_the_same_folder_are_refused(story: Story) -> None:
    before = times(story.here)
    other = replace(story.plan, num_items=7, dtype="bfloat16")
    with pytest.raises(ArtifactError, match="dtype is 'float32' there, 'bfloat16' here; num_items is 6 there, 7 here"):
        run(other, story.sides, story.here, story.there)
    with pytest.raises(ArtifactError, match=r"pytorch_target is 'ssh://.*' there, 'ssh://elsewhere' here"):
        run(story.plan, untouched("local", "ssh://elsewhere"), story.here, story.there)
    assert run(replace(story.plan, start_timeout_sec=5), story.sides, story.here, story.there).passed
    assert times(story.here) == before


def test_matrices_of_another_run_are_refused_where_its_record_is_lost(story: Story, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(story.here, copy)
    (copy / ".compare_backends.json").unlink()
    with pytest.raises(ArtifactError, match=r"jax_portable_matrix\.json is of another run"):
        run(replace(story.plan, timed_runs=2), untouched(), copy)
    for path in copy.glob("*_matrix.json"):
        path.unlink()
    with pytest.raises(ArtifactError, match="contains other requests"):
        run(replace(story.plan, query_tokens=5), untouched(), copy)
    assert not (copy / ".compare_backends.json").exists()


def test_half_a_matrix_is_kept_aside_and_measured_again(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    plan, log = small_plan(checkpoint_of("qwen3")), Log()
    write_matrices(tmp_path / "run", plan)
    (tmp_path / "run" / "jax_portable_matrix.json").write_text('{"half":')
    made = CompareRun(plan, untouched(), tmp_path / "run", "", log.watcher)
    assert [step.name for step in made.begin()] == ["jax_portable"]
    assert (tmp_path / "run" / "jax_portable_matrix.json.broken").read_text() == '{"half":'
    assert "renamed to jax_portable_matrix.json.broken, and written again" in log.lines[0]


def test_an_accelerator_that_is_absent_ends_it_before_any_server(
    tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    where = sides() | {"pytorch": CompareSide("pytorch", LOCAL, "RTX PRO 6000")}
    with pytest.raises(TargetError, match=r"local, for pytorch: expected an accelerator 'RTX PRO 6000', got .*"):
        run(small_plan(checkpoint_of("qwen3")), where, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_matrix_in_which_nothing_worked_fails_the_run_and_is_measured_again(
    tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    """The target has measured it, and that is all there is to measure."""
    plan, log = small_plan(checkpoint_of("qwen3")), Log()
    write_matrices(tmp_path / "run", plan, failed="jax_portable")
    asked: list[str] = []

    class Asked:
        target, python = LOCAL.target, ""

        def call(self, verb: str, *arguments: str, on_line: object = None) -> dict[str, Any]:
            asked.append(verb)
            return {**FACTS, "devices": ["jax: cpu"], "model": None} if verb == "facts" else {}

    where = untouched() | {"jax": CompareSide("jax", cast(RemoteAgent, Asked()))}
    (tmp_path / "run" / "logs").mkdir()
    for name in ("logs/jax_portable_server.log", "logs/jax_portable_matrix.log", "jax_portable_matrix.md"):
        (tmp_path / "run" / name).touch()
    for _ in range(2):
        result = run(plan, where, tmp_path / "run", log=log)
        assert result.failed == ("jax_portable",)
        assert not result.passed
    assert asked == ["clean", "facts", "matrix", "release"] * 2
    assert "jax portable matrix: no chunk size succeeded; the same command measures it again" in log.lines


@pytest.mark.slow
def test_the_embedded_model_on_both_backends_of_this_machine(tmp_path: Path) -> None:
    plan = ComparePlan(
        model="embedded",
        dtype="float32",
        query_tokens=32,
        num_items=4,
        item_tokens=4,
        client_chunk_sizes=(4, 1),
        timed_runs=2,
        timed_runs_confirm=1,
        jax_server_flags=("--warmup", "none"),
    )
    result = run(plan, sides(), tmp_path / "run")
    assert result.passed, result.comparison.recommendations
    before = times(tmp_path / "run")
    assert list(run(plan, untouched(), tmp_path / "run").skipped) == SKIPPED
    assert times(tmp_path / "run") == before
