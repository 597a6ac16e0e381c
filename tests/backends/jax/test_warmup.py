"""Warm-up compiles all that requests can need, says beforehand how much that is, and finds it on disk the next time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.backends.jax.backend import JaxBackend
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import BackendOptions, Program, Warmup
from prefixwise.launch.loading import warm_up
from prefixwise.models.sources import open_checkpoint
from prefixwise.plan.algorithms import max_dense_len
from tests.backends.jax.compilations import COMPILED, count_events, own_cache, score_a_little

pytestmark = pytest.mark.usefixtures("quick_compilation")

CPU: dict[str, Any] = {"backend": "jax", "device": "cpu", "dtype": "float32"}
LONGEST = 1024  # the token budget, and one more than the context of the model: two sizes of programs
COMPILE_EVENTS = "/jax/core/compile/"
ALGORITHMS = ("serial", "packed", "prefill_extend", "auto")
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Warm:
    """A warmed-up scorer, what its warm-up reported, and what jax compiled meanwhile."""

    scorer: Scorer
    reported: list[tuple[int, int, str]]
    num_compiled: int
    first_events: dict[str, Counter[str]]  # what jax did for the first request, by algorithm


@pytest.fixture(scope="module", params=["segment", pytest.param("dense", marks=pytest.mark.slow)])
def warm(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Iterator[Warm]:
    reported: list[tuple[int, int, str]] = []
    with Scorer(checkpoint_of("short"), **CPU, mask=request.param, token_budget=LONGEST) as scorer:
        with count_events() as events:
            warm_up(scorer.engine, lambda *progress: reported.append(progress))
        first_events = {name: events_of_request(scorer, name) for name in ALGORITHMS}
        yield Warm(scorer, reported, events[COMPILED], first_events)


def events_of_request(scorer: Scorer, algorithm: Any) -> Counter[str]:
    with count_events() as events:
        scorer.score([*range(200)], [[*range(30)]] * 4, label_token_ids=[3], score_mode="prob", algorithm=algorithm)
    return events


def random_request(random: np.random.Generator) -> dict[str, Any]:
    """Of any geometry that fits the context."""

    def ids(count: int) -> list[int]:
        return random.integers(0, 512, count).tolist()

    def size(most: int) -> int:
        """Small ones as often as large ones."""
        return int(np.exp(random.uniform(0, np.log(most + 1))))

    query_len = size(LONGEST - 200)
    num_items = size(min(20, 1000 // query_len))
    longest_item = min(size(LONGEST - query_len - 10), 1000 // num_items)
    items = [ids(int(length)) for length in random.integers(0, longest_item + 1, num_items)]
    body: dict[str, Any] = {"query": ids(query_len), "items": items, "algorithm": str(random.choice(ALGORITHMS))}
    if random.random() < 0.2:
        labels = [ids(int(length)) for length in random.integers(1, 5, 3)]
        return {**body, "label_token_ids": labels, "label_scoring": "sequence", "score_mode": "logprob"}
    mode = str(random.choice(["softmax", "logit", "prob", "logprob"]))
    item_first = bool(random.random() < 0.2)
    labels = random.choice(512, 1 + size(49), replace=False).tolist()  # one alone, or one twice, is warned of
    return {**body, "label_token_ids": labels, "score_mode": mode, "item_first": item_first}


class TestWarmup:
    def test_it_compiles_as_many_programs_as_it_says(self, warm: Warm) -> None:
        total = len(warm.reported)
        assert warm.num_compiled == warm.scorer.engine.backend.num_compilations == total
        assert [(number, of) for number, of, _ in warm.reported] == [(number, total) for number in range(total)]

    def test_every_program_is_reported_by_its_title(self, warm: Warm) -> None:
        titles = [title for _, _, title in warm.reported]
        longest_dense = max_dense_len(warm.scorer.engine.planner.options)
        programs = warm.scorer.engine.backend.programs(max_dense_len=longest_dense)
        assert titles == [program.title for program in programs]
        assert len(set(titles)) == len(titles)
        assert ("sequences, 1024 tokens, dense mask of 1024 columns" in titles) == (longest_dense > 0)
        for size in (512, LONGEST):
            for kind in ("prefill", "sequences", "extend", "score"):
                assert f"{kind}, {size} tokens" in titles
        assert titles[-2:] == ["labels", "logsumexp"]

    def test_no_request_afterwards_compiles_anything(self, warm: Warm) -> None:
        random = np.random.default_rng(5)
        with count_events() as events:
            for number in range(100):
                body = random_request(random)
                warm.scorer.score(**body)
                assert not events[COMPILED], f"request {number}: {body}"

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_the_first_request_waits_for_no_compilation(self, warm: Warm, algorithm: str) -> None:
        """Nor for the tracing and lowering before it. Counted, not timed: a clock would measure the machine too."""
        assert not {name for name in warm.first_events[algorithm] if name.startswith(COMPILE_EVENTS)}

    def test_a_second_warm_up_compiles_nothing(self, warm: Warm) -> None:
        with count_events() as events:
            assert warm_up(warm.scorer.engine) == len(warm.reported)
            assert not {name for name in events if name.startswith(COMPILE_EVENTS)}


class TestPrograms:
    @staticmethod
    def programs_of(folder: Path, warmup: Warmup) -> list[Program]:
        options = BackendOptions(device="cpu", dtype="float32", token_budget=LONGEST, warmup=warmup)
        return list(JaxBackend(open_checkpoint(folder), options).programs(max_dense_len=LONGEST))

    def test_fast_has_no_more_than_full(self, checkpoint_of: Callable[[str], Path]) -> None:
        fast, full = (self.programs_of(checkpoint_of("short"), warmup) for warmup in ("fast", "full"))
        assert 0 < len(fast) <= len(full)

    def test_forwards_over_the_kv_cache_are_no_larger_than_a_step(self, checkpoint_of: Callable[[str], Path]) -> None:
        """However long query and items are: they are computed in pieces."""
        with Scorer(checkpoint_of("qwen3"), **CPU) as scorer:
            backend = scorer.engine.backend
            assert isinstance(backend, JaxBackend)
            assert backend.info.step_tokens < 4096 < backend.info.token_buckets[-1] == 33_280
            listed = {program.title for program in backend.programs(max_dense_len=0)}
            body: dict[str, Any] = {"label_token_ids": [3], "score_mode": "logit", "algorithm": "prefill_extend"}
            scorer.score([*range(500)] * 5, [[5] * 2000, [6], [*range(400)]], **body)
            used = {spec.title for spec in backend._runner.programs._compiled}
        large = {title for title in listed if "33280" in title}
        assert large == {"sequences, 33280 tokens", "score, 33280 tokens"}
        assert used < listed and not used & large

    def test_pytorch_has_none(self, checkpoint_of: Callable[[str], Path]) -> None:
        reported: list[object] = []
        options: dict[str, Any] = {"backend": "torch", "device": "cpu", "warmup": "full"}
        with Scorer(
            checkpoint_of("short"), **options, on_program=lambda *progress: reported.append(progress)
        ) as scorer:
            assert warm_up(scorer.engine) == 0
        assert not reported


class TestCompilationCache:
    def test_a_second_scorer_finds_the_programs_of_the_first(
        self, checkpoint_of: Callable[[str], Path], tmp_path: Path
    ) -> None:
        with own_cache():
            first, second = (score_a_little(checkpoint_of("short"), tmp_path / "cache") for _ in range(2))
        self.check(first, second, tmp_path / "cache")

    @pytest.mark.slow
    def test_another_folder_in_the_same_process(self, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
        with own_cache():
            counts = [score_a_little(checkpoint_of("short"), tmp_path / name) for name in ("one", "other")]
        for name, count in zip(("one", "other"), counts, strict=True):
            assert count["found"] == 0
            assert len(list((tmp_path / name).glob("jit_*-cache"))) == count["written"] > 0

    @pytest.mark.slow
    def test_a_second_process_finds_them_too(self, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
        arguments = [str(checkpoint_of("short")), str(tmp_path / "cache")]
        command = [sys.executable, "-m", "tests.backends.jax.compilations", *arguments]
        runs = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for _ in range(2)]
        first, second = (json.loads(run.stdout) for run in runs)
        self.check(first, second, tmp_path / "cache")

    @staticmethod
    def check(first: dict[str, Any], second: dict[str, Any], folder: Path) -> None:
        assert second["scores"] == first["scores"]
        assert first["found"] == 0
        assert first["written"] == first["needed"] > 0
        assert len(list(folder.glob("jit_*-cache"))) == first["written"]
        assert second["found"] == second["needed"] == first["needed"] - second["read"]
        assert second["written"] == first["read"] == 0
        assert second["read"] == len(list((folder / "executables").iterdir())) == 4  # trunk, score, labels, logsumexp

    def test_a_folder_that_cannot_be_written(self, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(BackendError, match="must be a folder that can be written"):
            Scorer(checkpoint_of("short"), **CPU, compilation_cache_dir=tmp_path / "file" / "cache")
