"""LoRA adapters per request: equal to peft on transformers, isolated bit for bit, loaded and unloaded under load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixwise import Scorer
from prefixwise.contract.errors import InvalidValueError, ModelLoadError, ModelNotFoundError, NotFoundError
from prefixwise.contract.request import Algorithm
from prefixwise.engine import loras
from tests.checkpoints import make_classifier
from tests.lora_folders import merge_into, merged, write_adapter
from tests.reference import LOGIT_BOUND, Floats, Reference

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")

ALGORITHMS: tuple[Algorithm, ...] = ("serial", "packed", "prefill_extend")
RANDOM = np.random.default_rng(0)
QUERY: list[int] = RANDOM.integers(0, 512, 140).tolist()  # with all items it fits a forward of JAX
ITEMS: list[list[int]] = [RANDOM.integers(0, 512, length).tolist() for length in (3, 17, 1, 40, 300)]  # one is long
LABELS = [5, 77, 200]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, checkpoint_of: Callable[[str], Path]) -> dict[str, Path]:
    """Two adapters of all linear layers, one of a few, and one with its own head."""
    folder, base = tmp_path_factory.mktemp("adapters"), checkpoint_of("qwen3")
    return {
        "first": write_adapter(folder / "first", base, seed=1),
        "second": write_adapter(folder / "second", base, seed=2, rank=16, alpha=16),
        "few": write_adapter(folder / "few", base, seed=3, rank=1, targets=("v_proj", "down_proj")),
        "head": write_adapter(folder / "head", base, seed=4, rank=5, head="lm_head"),
    }


@pytest.fixture(scope="module")
def options(place: dict[str, Any]) -> dict[str, Any]:
    """JAX gets forwards of one size, so that few programs are compiled."""
    found = {**place, "dtype": "float32", "batch_invariant": place["device"] == "cuda"}
    return {**found, "token_budget": 512, "prefix_cache_bytes": 1 << 24} if place["backend"] == "jax" else found


@pytest.fixture(scope="module")
def scorer(
    options: dict[str, Any], checkpoint_of: Callable[[str], Path], adapters: dict[str, Path]
) -> Iterator[Scorer]:
    with Scorer(checkpoint_of("qwen3"), **options, lora=adapters, max_loras=5) as made:
        yield made


@pytest.fixture(scope="module")
def plain(options: dict[str, Any], checkpoint_of: Callable[[str], Path]) -> Iterator[Scorer]:
    with Scorer(checkpoint_of("qwen3"), **options) as made:
        yield made


def logits(scorer: Scorer, lora: str | None, algorithm: Algorithm = "auto", query: list[int] | None = None) -> Floats:
    result = scorer.score(
        query or QUERY, ITEMS, label_token_ids=LABELS, score_mode="logit", lora=lora, algorithm=algorithm
    )
    assert result.model == (lora or scorer.engine.config.model_name)
    return np.array(result.scores)


class TestScores:
    @pytest.mark.parametrize("name", ["first", "second", "few", "head"])
    def test_equal_to_merged_weights(
        self, scorer: Scorer, checkpoint_of: Callable[[str], Path], adapters: dict[str, Path], name: str
    ) -> None:
        """By every algorithm, cold and from the KV cache, with an item that is computed in pieces."""
        reference = merged(checkpoint_of("qwen3"), adapters[name])
        expected = reference.label_logits([QUERY + item for item in ITEMS])[:, LABELS]
        of_model = logits(scorer, None)
        assert abs(of_model - expected).max() > 0.1  # the adapter does something, and the next request is not its
        for algorithm in (*ALGORITHMS, ALGORITHMS[-1]):
            np.testing.assert_allclose(logits(scorer, name, algorithm), expected, atol=LOGIT_BOUND, rtol=0)

    def test_probabilities_over_the_vocabulary_use_the_adapters_head(
        self, scorer: Scorer, checkpoint_of: Callable[[str], Path], adapters: dict[str, Path]
    ) -> None:
        from prefixwise.engine.likelihoods import Likelihoods
        from prefixwise.plan.likelihoods import TokenSequence

        reference = merged(checkpoint_of("qwen3"), adapters["head"])
        expected = torch.log_softmax(torch.from_numpy(reference.last_logits(QUERY + ITEMS[0])), -1).numpy()
        result = scorer.score(QUERY, ITEMS[:1], label_token_ids=LABELS, score_mode="logprob", lora="head")
        np.testing.assert_allclose(result.scores[0], expected[LABELS], atol=LOGIT_BOUND, rtol=0)
        likelihoods = Likelihoods(scorer.engine)
        ids = np.array(QUERY[:40], np.int32)
        prepared = likelihoods.prepare([TokenSequence(ids, 1, False)], model="head")
        (found,) = likelihoods.finish(prepared, [scorer.engine.run(each) for each in prepared.requests])
        rows = torch.log_softmax(torch.from_numpy(reference.all_logits(QUERY[:39])), -1)
        wanted = rows[np.arange(39), QUERY[1:40]].numpy()
        np.testing.assert_allclose(found.logprobs, wanted, atol=LOGIT_BOUND, rtol=0)

    def test_a_classifier_with_an_adapters_head(
        self, options: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path
    ) -> None:
        from transformers import AutoModelForSequenceClassification

        rows = RANDOM.standard_normal((3, 64)).astype(np.float32)
        base = make_classifier(tmp_path / "base", checkpoint_of("qwen3"), rows)
        folder = write_adapter(tmp_path / "adapter", base, head="score", size=0.2)
        model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32).eval()
        merge_into(model, folder)
        model.config.pad_token_id = 0
        with torch.inference_mode():
            expected = [model(torch.tensor([each])).logits[0].numpy() for each in ([5, 6, 7], [9, 8])]
        with Scorer(base, **options, lora={"mine": folder}) as scorer:
            found = scorer.classify([[5, 6, 7], [9, 8]], lora="mine", use_activation=False)
        np.testing.assert_allclose([each.probs for each in found], expected, atol=LOGIT_BOUND, rtol=0)


class TestIsolation:
    def test_requests_of_many_adapters_in_one_step(self, scorer: Scorer, plain: Scorer) -> None:
        """Each has the bits that it has alone, and the model's own those of an engine without adapters."""
        names = [None, "first", "second", "head", "few", "first", None]
        queries = [[*QUERY[:-1], number] for number in range(len(names))]  # cold
        alone = [logits(scorer, name, query=query) for name, query in zip(names, queries, strict=True)]
        scorer.engine.scheduler.call(scorer.engine.scheduler.cache.clear)
        started, threads = threading.Barrier(len(names)), ThreadPoolExecutor(len(names))

        def together(name: str | None, query: list[int]) -> Floats:
            started.wait()
            return logits(scorer, name, query=query)

        for _ in range(2):  # cold and cached
            found = list(threads.map(together, names, queries))
            for name, query, ours, theirs in zip(names, queries, found, alone, strict=True):
                np.testing.assert_array_equal(ours, theirs)
                if name is None:
                    np.testing.assert_array_equal(ours, logits(plain, None, query=query))
        threads.shutdown()

    def test_adapters_do_not_share_kv_blocks(self, scorer: Scorer) -> None:
        query = [9, *QUERY, *QUERY]  # of two blocks, and a part of one
        first = [scorer.score(query, ITEMS, label_token_ids=LABELS, lora=name) for name in ("first", "second", None)]
        again = [scorer.score(query, ITEMS, label_token_ids=LABELS, lora=name) for name in ("first", "second", None)]
        assert [each.usage.cached_tokens for each in first] == [0, 0, 0]
        assert min(each.usage.cached_tokens for each in again) >= 256
        assert [each.scores for each in again] == [each.scores for each in first]


class TestLoading:
    def test_loaded_replaced_and_unloaded_under_load(self, scorer: Scorer, adapters: dict[str, Path]) -> None:
        """Requests that run keep the adapter that they began with, whatever takes its name or its slot."""
        allowed = [logits(scorer, "first"), logits(scorer, "second")]
        scorer.load_lora("moving", adapters["first"])
        stop, found = threading.Event(), list[Floats | None]()

        def send() -> None:
            while not stop.is_set():
                try:
                    found.append(logits(scorer, "moving"))
                except ModelNotFoundError:
                    found.append(None)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        for folder in ("second", "first", "second"):
            scorer.unload_lora("moving")  # all slots are taken without it: the next load may wait for its requests
            scorer.load_lora("moving", adapters[folder])
        stop.set()
        for thread in threads:
            thread.join()
        scores = [each for each in found if each is not None]
        assert scores
        assert all(any(np.array_equal(each, one) for one in allowed) for each in scores)
        np.testing.assert_array_equal(logits(scorer, "moving"), allowed[1])
        scorer.unload_lora("moving")

    def test_load_inplace(self, scorer: Scorer, adapters: dict[str, Path]) -> None:
        query = [11, *QUERY]
        scorer.load_lora("named", adapters["first"])
        before = logits(scorer, "named", query=query)
        scorer.unload_lora("few")
        with pytest.raises(InvalidValueError, match="loaded already"):
            scorer.load_lora("named", adapters["second"])
        scorer.load_lora("named", adapters["second"], load_inplace=True)
        after = logits(scorer, "named", query=query)
        np.testing.assert_array_equal(after, logits(scorer, "second", query=query))  # no block of the first is read
        assert not np.array_equal(before, after)
        scorer.unload_lora("named")
        scorer.load_lora("few", adapters["few"])

    def test_an_unloaded_adapter_is_not_found(self, scorer: Scorer) -> None:
        for name in ("nobody", "default"):
            with pytest.raises(ModelNotFoundError, match=r"nobody|default"):
                logits(scorer, name)
        with pytest.raises(NotFoundError, match="nobody"):
            scorer.unload_lora("nobody")

    def test_no_room(
        self, scorer: Scorer, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(loras, "SLOT_SECONDS", 0.01)
        scorer.load_lora("fifth", adapters["few"])
        with pytest.raises(InvalidValueError, match="at most 5 LoRA adapters"):
            scorer.load_lora("sixth", adapters["few"])
        scorer.unload_lora("fifth")

    def test_no_room_at_all(
        self, place: dict[str, Any], checkpoint_of: Callable[[str], Path], adapters: dict[str, Path]
    ) -> None:
        with (
            Scorer(checkpoint_of("qwen3"), **place) as scorer,
            pytest.raises(InvalidValueError, match=r"max_loras .* must be 1 or more, got 0"),
        ):
            scorer.load_lora("first", adapters["first"])

    def test_a_broken_adapter_changes_nothing(
        self, scorer: Scorer, checkpoint_of: Callable[[str], Path], tmp_path: Path
    ) -> None:
        before = logits(scorer, "first")
        folder = write_adapter(tmp_path / "broken", checkpoint_of("qwen3"), use_dora=True)
        with pytest.raises(InvalidValueError, match="use_dora is not supported"):
            scorer.load_lora("first", folder, load_inplace=True)
        np.testing.assert_array_equal(logits(scorer, "first"), before)
        with pytest.raises(ModelLoadError, match=r"adapter 'bad' cannot be loaded: .*use_dora"):
            Scorer(checkpoint_of("qwen3"), backend="torch", device="cpu", lora={"bad": folder}, max_lora_rank=8)

    def test_not_for_experts(self, place: dict[str, Any], checkpoint_of: Callable[[str], Path]) -> None:
        from prefixwise.contract.errors import BackendError

        with pytest.raises(BackendError, match="experts"):
            Scorer(checkpoint_of("qwen3_moe"), **place, max_loras=1)


class TestPeft:
    """Adapters that peft itself has made and saved."""

    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("family", ["qwen3", "phi3"])
    def test_equal_to_peft(
        self, checkpoint_of: Callable[[str], Path], family: str, device: str, tmp_path: Path
    ) -> None:
        peft = pytest.importorskip("peft")
        from transformers import AutoModelForCausalLM

        base = checkpoint_of(family)
        settings = {
            "ranks": {
                "r": 3,
                "lora_alpha": 4,
                "target_modules": "all-linear",
                "use_rslora": True,
                "rank_pattern": {"down_proj": 6},
                "alpha_pattern": {r"layers\.1\.self_attn\.o_proj": 9},
            },
            "layers": {"r": 8, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]},
        }
        models = {}
        for name, fields in settings.items():
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **fields)
            models[name] = peft.get_peft_model(model, config).eval()
            models[name].save_pretrained(tmp_path / name)
        folders = {name: tmp_path / name for name in models}
        with Scorer(base, backend="torch", device=device, dtype="float32", lora=folders) as scorer:
            for name, model in models.items():
                with torch.inference_mode():
                    expected = [model(torch.tensor([QUERY + item])).logits[0, -1, LABELS].numpy() for item in ITEMS]
                np.testing.assert_allclose(logits(scorer, name), expected, atol=LOGIT_BOUND, rtol=0)


@pytest.mark.gpu
class TestHalfPrecisionOnAGpu:
    """Where PyTorch has B's as columns of the matrices (`max_loras` of 2), and kernels of their own (of 6)."""

    @pytest.fixture(scope="class")
    def wide_adapters(self, tmp_path_factory: pytest.TempPathFactory, checkpoint_of: Any) -> dict[str, Path]:
        folder, base = tmp_path_factory.mktemp("wide"), checkpoint_of("wide")
        return {
            name: write_adapter(folder / name, base, seed=seed, rank=rank, size=0.03)
            for seed, (name, rank) in enumerate({"first": 16, "second": 5}.items())
        }

    @pytest.mark.parametrize(("backend", "max_loras"), [("torch", 2), ("torch", 6), ("jax", 2)])
    def test_close_to_merged_weights_and_bits_do_not_move(
        self, backend: str, max_loras: int, checkpoint_of: Callable[[str], Path], wide_adapters: dict[str, Path]
    ) -> None:
        base = checkpoint_of("wide")
        options: dict[str, Any] = {"backend": backend, "device": "cuda", "dtype": "bfloat16", "batch_invariant": True}
        names = [None, "first", "second", "first", None]
        queries = [[*QUERY[:-1], number] for number in range(len(names))]
        with Scorer(base, **options, lora=wide_adapters, max_loras=max_loras) as scorer:
            alone = [logits(scorer, name, query=query) for name, query in zip(names, queries, strict=True)]
            for name, query in zip(names[:3], queries, strict=False):
                reference = Reference.load(base) if name is None else merged(base, wide_adapters[name])
                expected = reference.label_logits([query + item for item in ITEMS])[:, LABELS]
                for algorithm in ALGORITHMS:
                    found = logits(scorer, name, algorithm, query)
                    assert np.abs(found - expected).max() <= 0.1
            scorer.engine.scheduler.call(scorer.engine.scheduler.cache.clear)
            with ThreadPoolExecutor(len(names)) as threads:
                for _ in range(2):  # cold and cached
                    together = threads.map(lambda name, query: logits(scorer, name, query=query), names, queries)
                    for ours, theirs in zip(together, alone, strict=True):
                        np.testing.assert_array_equal(ours, theirs)
        with Scorer(base, **options) as plain:
            for number in (0, 4):
                np.testing.assert_array_equal(logits(plain, None, query=queries[number]), alone[number])
