"""Executables on disk: a second start traces nothing and gives the same bits. A file that is damaged, of another
environment or open to others is not used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import jax
import pytest

from prefixwise import Scorer
from prefixwise.backends.jax import executables
from prefixwise.backends.jax.backend import JaxBackend
from prefixwise.backends.jax.executables import FOLDER, ExecutableStore
from prefixwise.backends.jax.mesh import make_mesh, set_jax_option
from prefixwise.backends.jax.programs import COMPILER_OPTIONS, Programs
from tests.backends.jax.compilations import loaded_programs, own_cache

pytestmark = pytest.mark.usefixtures("quick_compilation")

REQUEST: dict[str, Any] = {"label_token_ids": [3, 5], "score_mode": "prob", "algorithm": "prefill_extend"}
NUM_PROGRAMS = 5  # prefill, extend, score, labels, logsumexp


class Start:
    """The scores of a new scorer, and the programs that it traced and read."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.traced: list[str] = []

        def lowered(programs: Programs, spec: Any) -> Any:
            self.traced.append(spec.title)
            return before(programs, spec)

        before = Programs.lowered
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Programs, "lowered", lowered)
            with Scorer(folder, backend="jax", device="cpu", compilation_cache_dir=cache, token_budget=512) as scorer:
                self.scores = scorer.score([*range(200)], [[4], [5, 6]], **REQUEST).scores
                self.num_read = loaded_programs(scorer)


@pytest.fixture(scope="module")
def model(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("short")


@pytest.fixture(scope="module")
def first_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first") / "cache"


@pytest.fixture(scope="module")
def first(model: Path, first_cache: Path) -> Start:
    with own_cache():
        return Start(model, first_cache)


@pytest.fixture
def cache(tmp_path: Path, first: Start, first_cache: Path) -> Iterator[Path]:
    """What the first start has left, to change."""
    copytree(first_cache, tmp_path / "cache")
    with own_cache():
        yield tmp_path / "cache"


def files(cache: Path) -> list[Path]:
    return sorted((cache / FOLDER).iterdir())


def expect_compiled(again: Start, first: Start) -> None:
    """As if there were no files."""
    assert again.scores == first.scores
    assert len(again.traced) == NUM_PROGRAMS and not again.num_read


class TestASecondStart:
    def test_traces_nothing_and_gives_the_same_bits(self, model: Path, cache: Path, first: Start) -> None:
        assert len(first.traced) == len(files(cache)) == NUM_PROGRAMS
        second = Start(model, cache)
        assert second.scores == first.scores
        assert not second.traced and second.num_read == NUM_PROGRAMS

    def test_files_are_the_users_own(self, cache: Path, first: Start) -> None:
        assert (cache / FOLDER).stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in files(cache)} == {0o600}

    def test_programs_of_jaxs_own_cache_are_kept_too(self, model: Path, cache: Path, first: Start) -> None:
        rmtree(cache / FOLDER)
        expect_compiled(Start(model, cache), first)
        third = Start(model, cache)
        assert third.scores == first.scores
        assert not third.traced

    def test_without_a_cache_there_are_no_files(self, model: Path) -> None:
        with Scorer(model, backend="jax", device="cpu", token_budget=512) as scorer:
            scorer.score([1, 2], [[4]], **REQUEST)
            assert not loaded_programs(scorer)


def flip_a_byte(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def with_another_content(content: bytes) -> bytes:
    """With the right digest: what another version may write."""
    return executables._MAGIC + sha256(b"no pickle").digest() + b"no pickle"


class TestFilesThatAreNotUsed:
    @pytest.mark.parametrize(
        "damage",
        [
            flip_a_byte,
            pytest.param(lambda content: content[:1000], marks=pytest.mark.slow),
            pytest.param(lambda content: b"", marks=pytest.mark.slow),
            with_another_content,
        ],
    )
    def test_damaged(
        self,
        model: Path,
        cache: Path,
        first: Start,
        damage: Callable[[bytes], bytes],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for file in files(cache):
            file.write_bytes(damage(file.read_bytes()))
        with caplog.at_level(logging.WARNING, "prefixwise"):
            expect_compiled(Start(model, cache), first)
        assert len(caplog.messages) == NUM_PROGRAMS
        assert not Start(model, cache).traced  # they were written again

    @pytest.mark.parametrize(
        "change",
        [
            "source",
            "compiler",
            *(pytest.param(each, marks=pytest.mark.slow) for each in ("flags", "packages", "setting")),
        ],
    )
    def test_of_another_environment(
        self, model: Path, cache: Path, first: Start, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if change == "source":
            monkeypatch.setattr(executables, "_source_digest", lambda: "another")
        elif change == "flags":
            monkeypatch.setenv("LIBTPU_INIT_ARGS", "--another")
        elif change == "compiler":
            monkeypatch.setitem(
                COMPILER_OPTIONS, "cpu", {**COMPILER_OPTIONS["cpu"], "xla_embed_ir_in_executable": True}
            )
        elif change == "packages":
            monkeypatch.setattr(executables, "_is_package", lambda name: False)
        else:
            monkeypatch.setattr(executables, "_is_setting", lambda name: False)
        expect_compiled(Start(model, cache), first)
        assert len(files(cache)) == 2 * NUM_PROGRAMS

    def test_in_a_folder_that_others_may_write_to(
        self, model: Path, cache: Path, first: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        (cache / FOLDER).chmod(0o770)
        with caplog.at_level(logging.WARNING, "prefixwise"):
            expect_compiled(Start(model, cache), first)
        assert "others may write to it (mode 770; expected 700" in caplog.text

    def test_that_others_may_write_to(self, model: Path, cache: Path, first: Start) -> None:
        for file in files(cache):
            file.chmod(0o606)
        expect_compiled(Start(model, cache), first)

    def test_behind_a_link(self, model: Path, cache: Path, first: Start) -> None:
        """Whoever may write to the cache's own folder could make one."""
        (cache / FOLDER).rename(cache / "elsewhere")
        (cache / FOLDER).symlink_to("elsewhere")
        expect_compiled(Start(model, cache), first)

    def test_of_another_user(self, cache: Path, first: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: (cache / FOLDER).stat().st_uid + 1)
        status = (cache / FOLDER).stat()
        reason = executables._why_not_private(status, lambda mode: True)
        assert reason == (None if status.st_uid == 0 else "it belongs to another user")


@pytest.mark.parametrize("warmup", ["full", "none"])
def test_a_program_that_is_read_and_does_not_run_is_compiled_again(
    model: Path, cache: Path, first: Start, monkeypatch: pytest.MonkeyPatch, warmup: str
) -> None:
    def run(*arguments: object) -> None:
        raise RuntimeError("a function is missing")

    monkeypatch.setattr(ExecutableStore, "load", lambda *_: run)
    options: dict[str, Any] = {"compilation_cache_dir": cache, "token_budget": 512, "warmup": warmup}
    with Scorer(model, backend="jax", device="cpu", **options) as scorer:
        assert scorer.score([*range(200)], [[4], [5, 6]], **REQUEST).scores == first.scores
        assert not loaded_programs(scorer)


def test_what_was_read_and_fails_later_is_compiled_at_its_next_use(model: Path, cache: Path, first: Start) -> None:
    """A device says so when its output is waited for. Programs that have run once are trusted."""
    with Scorer(model, backend="jax", device="cpu", compilation_cache_dir=cache, token_budget=512) as scorer:
        backend = scorer.engine.backend
        assert isinstance(backend, JaxBackend)
        programs = backend._runner.programs
        assert scorer.score([*range(200)], [[4], [5, 6]], **REQUEST).scores == first.scores
        backend._recover()
        assert programs.num_loaded == NUM_PROGRAMS, "these have run"
        programs._unproven.update(programs._loaded)
        backend._recover()
        assert programs.num_compiled == 0
        assert scorer.score([*range(200)], [[4], [5, 6]], **REQUEST).scores == first.scores
        assert programs.num_loaded == 0


def test_a_bucket_is_left_to_jaxs_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And so is a folder that cannot be written to, but for what it has."""
    mesh = make_mesh(jax.devices("cpu"), 1, 1)
    assert ExecutableStore.of(tmp_path, mesh).suffix
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not ExecutableStore.of(tmp_path, mesh).suffix
    with own_cache():
        set_jax_option("jax_compilation_cache_dir", "gs://bucket/compiled")
        store = ExecutableStore.of(Path("gs://bucket/compiled"), mesh)
    assert not store.suffix and not Path("gs:").exists()
    assert store.recall("which?", lambda: 3) == 3


class TestAnswers:
    def test_are_found_once(self, tmp_path: Path) -> None:
        mesh, asked = make_mesh(jax.devices("cpu"), 1, 1), []

        def find() -> list[int] | None:
            asked.append(1)
            return None if len(asked) > 1 else [256, 512]

        for _ in range(2):
            store = ExecutableStore.of(tmp_path, mesh)
            assert store.recall("which?", find) == [256, 512]
            store.close()
        assert len(asked) == 1
        store = ExecutableStore.of(tmp_path, mesh)
        assert store.recall("and which others?", find) is None
        store.close()
        assert ExecutableStore.of(tmp_path, mesh).recall("and which others?", lambda: 1) is None

    def test_without_a_folder_they_are_found_every_time(self) -> None:
        store = ExecutableStore()
        answers = iter((1, 2))
        assert [store.recall("which?", lambda: next(answers)) for _ in range(2)] == [1, 2]
