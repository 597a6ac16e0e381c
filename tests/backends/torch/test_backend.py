from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.load import load_backend
from prefixwise.backends.torch import attention, devices, model
from prefixwise.backends.torch import backend as backend_module
from prefixwise.backends.torch import linear as linear_module
from prefixwise.backends.torch.backend import TorchBackend
from prefixwise.backends.torch.kv_blocks import TorchBlock
from prefixwise.contract.errors import BackendError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import BackendOptions
from prefixwise.forward.batch import KVBlock, Layout, RunningForward
from prefixwise.models.sources import open_checkpoint
from tests.backends.torch.batches import (
    ITEMS,
    PREFIXES,
    READS,
    Blocks,
    Segments,
    extend_batch,
    prefill,
    prefill_batch,
    sequences_batch,
)
from tests.reference import is_emulated

RANDOM = np.random.default_rng(6)
LONG_PREFIX = RANDOM.integers(0, 500, 700).astype(np.int32)
# With a model's folder, or nothing for the embedded one, and a dtype: many items, and one that is computed in pieces.
SCORES_AND_THREADS = """
import json, sys
import numpy as np
import torch
from prefixwise import Scorer
random, scores = np.random.default_rng(0), []
with Scorer(sys.argv[1] or None, backend="torch", device="cpu", dtype=sys.argv[2]) as scorer:
    for num_items, length in ((6, 33), (1, 300)):
        query, items = (random.integers(0, 512, shape).tolist() for shape in (300, (num_items, length)))
        for mode in ("logit", "logprob"):
            scores.append(scorer.score(query, items, label_token_ids=[5, 77], score_mode=mode).scores)
print(json.dumps({"threads": torch.get_num_threads(), "scores": scores}))
"""


@pytest.fixture(
    scope="module", params=["cpu-float32", "cpu-bfloat16", pytest.param("cuda-bfloat16", marks=pytest.mark.gpu)]
)
def backend(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> TorchBackend:
    device, dtype = request.param.split("-")
    return TorchBackend(open_checkpoint(checkpoint_of("medium")), dtype=dtype, device=device, batch_invariant=True)


class TestSeveralPrefixes:
    def test_items_of_several_requests_share_a_forward_and_no_bit(self, backend: TorchBackend) -> None:
        prefixes = prefill(backend, PREFIXES)
        together = backend.forward(extend_batch(ITEMS, READS, prefixes))
        for number, (item, reads) in enumerate(zip(ITEMS, READS, strict=True)):
            alone = backend.forward(extend_batch([item], [0], prefill(backend, [PREFIXES[reads]])))
            assert np.array_equal(alone.label_logits[0], together.label_logits[number])
            assert alone.logsumexp is not None
            assert together.logsumexp is not None
            assert alone.logsumexp[0] == together.logsumexp[number]

    def test_labels_of_another_request_move_no_bit(self, backend: TorchBackend) -> None:
        prefixes = prefill(backend, PREFIXES)
        batch = extend_batch(ITEMS, READS, prefixes)
        others = batch.label_ids.copy()
        others[1:] = RANDOM.integers(0, 512, others[1:].shape)
        mixed = backend.forward(replace(batch, label_ids=others))
        assert np.array_equal(mixed.label_logits[0], backend.forward(batch).label_logits[0])

    def test_blocks_of_several_prefixes_are_those_of_each_alone(self, backend: TorchBackend) -> None:
        together = prefill(backend, [LONG_PREFIX, *PREFIXES])
        for tokens, blocks in zip([LONG_PREFIX, *PREFIXES], together, strict=True):
            assert_same_blocks(backend, prefill(backend, [tokens])[0], blocks)


def assert_same_blocks(backend: TorchBackend, found: Blocks, expected: Blocks) -> None:
    assert [block.num_tokens for block in found] == [block.num_tokens for block in expected]
    for block, other in zip(found, expected, strict=True):
        assert torch.equal(contents(backend, block), contents(backend, other))


def contents(backend: TorchBackend, block: KVBlock) -> torch.Tensor:
    """[layers, 2, tokens, K, H]."""
    if backend._paged is not None:
        return backend._paged.kv_cache.contents(block)
    assert isinstance(block, TorchBlock)
    return block.keys_values


class TestPrefixInSeveralForwards:
    """Cached blocks, and blocks that this forward computes, give the same bits."""

    @pytest.mark.parametrize("stops", [(256,), (128, 640), (256, 384)])
    def test_blocks_and_logits_are_those_of_one_forward(self, backend: TorchBackend, stops: tuple[int, ...]) -> None:
        whole = prefill(backend, [LONG_PREFIX])
        cached: list[Blocks] = [()]
        for stop in (*stops, len(LONG_PREFIX)):
            cached = prefill(backend, [LONG_PREFIX[:stop]], cached)
        assert_same_blocks(backend, cached[0], whole[0])
        found, expected = (backend.forward(extend_batch(ITEMS, [0] * 6, each)) for each in (cached, whole))
        assert np.array_equal(found.label_logits, expected.label_logits)

    def test_several_prefixes_continue_in_one_forward(self, backend: TorchBackend) -> None:
        prefixes = [LONG_PREFIX, PREFIXES[0], LONG_PREFIX[::-1].copy()]
        cached = [*prefill(backend, [LONG_PREFIX[:384]]), (), *prefill(backend, [prefixes[2][:128]])]
        for found, expected in zip(prefill(backend, prefixes, cached), prefill(backend, prefixes), strict=True):
            assert_same_blocks(backend, found, expected)

    def test_an_item_beside_the_blocks_that_it_reads(self, backend: TorchBackend) -> None:
        def logits(cached: Blocks) -> NDArray[np.float32]:
            segments = Segments()
            number = segments.add_prefix(LONG_PREFIX, cached)
            # The last one does not read as far as the cached blocks go.
            for item, length in zip(ITEMS, (700, 700, 700, 300, 256, 200), strict=True):
                segments.add(item, number, length, is_scored=True)
            return backend.forward(segments.batch(Layout.EXTEND)).label_logits

        ((*blocks,),) = prefill(backend, [LONG_PREFIX])
        for num_cached in (0, 2, 5):
            assert np.array_equal(logits(tuple(blocks[:num_cached])), logits(tuple(blocks)))


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """What the CPU emulates takes the path of float32, as `TestOtherProcessors` shows: a few heads will do."""
    is_one_of_many = test == "test_all_give_the_same_bits" and parameters["model"] != "heads-9-3"
    return is_one_of_many and is_emulated(parameters["dtype"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestAlgorithmsOnACpu:
    @pytest.mark.parametrize("model", ["medium", "heads-9-3", "heads-16-8", "heads-8-1"])
    def test_all_give_the_same_bits(self, checkpoint_of: Callable[[str], Path], model: str, dtype: str) -> None:
        backend = TorchBackend(open_checkpoint(checkpoint_of(model)), dtype=dtype, device="cpu")
        items = [item % 500 for item in ITEMS]  # the smallest vocabulary has 509
        extended = backend.forward(extend_batch(items, [0] * 6, prefill(backend, [LONG_PREFIX])))
        others = [
            sequences_batch(LONG_PREFIX, [[item] for item in items], Layout.CAUSAL),
            sequences_batch(LONG_PREFIX, [items[:2], items[2:]], Layout.PACKED),
            sequences_batch(LONG_PREFIX, [items], Layout.PACKED, "dense"),
        ]
        for batch in others:
            found = backend.forward(batch)
            assert np.array_equal(found.label_logits, extended.label_logits)
            assert np.array_equal(found.logsumexp, extended.logsumexp)  # type: ignore[arg-type]  # asked for


class TestOtherProcessors:
    """What this processor has is switched off: units for half precision, row counts of tiles that are exact."""

    @pytest.fixture
    def no_units(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (devices, linear_module):
            monkeypatch.setattr(module, "native_cpu_dtypes", lambda: frozenset({torch.float32}))

    @pytest.fixture
    def forwards_in_float32(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
        """The dtypes of every GEMM and attention from here on."""
        seen: list[torch.dtype] = []

        def watch(function: Callable[..., Any]) -> Callable[..., Any]:
            def watched(first: torch.Tensor, *others: Any, **options: Any) -> Any:
                seen.extend(each.dtype for each in (first, *others) if isinstance(each, torch.Tensor))
                return function(first, *others, **options)

            return watched

        monkeypatch.setattr(model, "linear", watch(linear_module.linear))
        monkeypatch.setattr(attention, "_FLASH", watch(attention._FLASH))
        return seen

    def isolated(self, backend: TorchBackend) -> NDArray[np.float32]:
        """The logits of ITEMS, which are those of each alone."""
        prefixes = prefill(backend, PREFIXES)
        together = backend.forward(extend_batch(ITEMS, READS, prefixes)).label_logits
        for number, (item, reads) in enumerate(zip(ITEMS, READS, strict=True)):
            alone = backend.forward(extend_batch([item], [0], prefill(backend, [PREFIXES[reads]])))
            assert np.array_equal(alone.label_logits[0], together[number])
        return together

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("family", ["medium", "qwen2", "gemma"])  # a bias, and norms in float32
    @pytest.mark.usefixtures("no_units")
    def test_an_emulated_dtype_is_that_of_the_weights_and_not_of_the_arithmetic(
        self,
        checkpoint_of: Callable[[str], Path],
        forwards_in_float32: list[torch.dtype],
        family: str,
        dtype: str,
    ) -> None:
        checkpoint = open_checkpoint(checkpoint_of(family))
        backend = TorchBackend(checkpoint, dtype=dtype, device="cpu")
        assert (backend.info.dtype, backend.info.compute_dtype) == (dtype, "float32")
        weights = backend._transformer.weights
        assert {weights.embedding.dtype, weights.layers[-1].o.dtype} == {devices.DTYPES[dtype]}
        logits = self.isolated(backend)
        assert set(forwards_in_float32) == {torch.float32}
        exact = self.isolated(TorchBackend(checkpoint, dtype="float32", device="cpu"))
        error = np.abs(logits - exact).max() / np.abs(exact).max()
        assert 0 < error < (0.03 if dtype == "bfloat16" else 0.003)

    @pytest.mark.parametrize("row_counts", [(128,), (256, 128), (128, 16)])
    def test_where_fewer_row_counts_are_exact_fewer_are_used(
        self, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, row_counts: tuple[int, ...]
    ) -> None:
        monkeypatch.setattr(model, "exact_row_counts", lambda layer, num_rows, dtype: row_counts)
        backend = TorchBackend(open_checkpoint(checkpoint_of("medium")), dtype="float32", device="cpu")
        assert backend.info.token_multiple == row_counts[-1]
        self.isolated(backend)


class TestBlockMemory:
    @pytest.fixture(autouse=True)
    def _owns_its_blocks(self, request: pytest.FixtureRequest) -> None:
        if "backend" in request.fixturenames and request.getfixturevalue("backend")._paged is not None:
            pytest.skip("its blocks are pages of the KV cache: cuda/test_paged.py")

    def test_a_block_owns_its_memory(self, backend: TorchBackend) -> None:
        for block in (block for blocks in prefill(backend, [LONG_PREFIX, *PREFIXES]) for block in blocks):
            assert isinstance(block, TorchBlock)
            assert block.keys_values.is_contiguous()
            assert block.keys_values.untyped_storage().nbytes() == block.keys_values.nbytes

    def test_dropping_one_frees_it_while_others_are_read(self, backend: TorchBackend) -> None:
        ((first, second, third),) = prefill(backend, PREFIXES[:1])
        backend.forward(extend_batch(ITEMS[:1], [0], [(first, second, third)]))
        assert isinstance(second, TorchBlock)
        gone = weakref.ref(second.keys_values)
        del second
        gc.collect()
        assert gone() is None
        assert third.num_tokens == 44

    def test_a_block_has_the_size_that_the_backend_says(self, backend: TorchBackend) -> None:
        block = prefill(backend, PREFIXES)[0][0]
        assert isinstance(block, TorchBlock)
        assert block.keys_values.nbytes == backend.info.kv_block_bytes

    def test_the_bytes_that_are_given_are_the_blocks_that_fit(self, checkpoint_of: Callable[[str], Path]) -> None:
        checkpoint = open_checkpoint(checkpoint_of("qwen3"))
        block_bytes = TorchBackend(checkpoint, device="cpu", dtype="float32").info.kv_block_bytes
        given = TorchBackend(checkpoint, device="cpu", dtype="float32", prefix_cache_bytes=4 * block_bytes - 1)
        assert given.info.num_kv_blocks == 3
        assert given.info.max_prefix_len == 384
        with pytest.raises(BackendError) as caught:
            TorchBackend(checkpoint, device="cpu", dtype="float32", prefix_cache_bytes=block_bytes - 1)
        assert str(caught.value) == (
            f"prefix_cache_bytes must be at least {block_bytes} (one block of 128 tokens), got {block_bytes - 1}"
        )

    def test_the_options_reach_it(self, checkpoint_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
        options = BackendOptions("torch", device="cpu", prefix_cache_bytes=1 << 24, token_budget=1000)
        with caplog.at_level(logging.WARNING, "prefixwise"):
            info = load_backend(open_checkpoint(checkpoint_of("qwen3")), options).info
        assert (info.num_kv_blocks, info.token_budget) == ((1 << 24) // info.kv_block_bytes, 1000)
        assert not caplog.messages

    def test_by_default_a_cpu_caches_a_gibibyte(self, checkpoint_of: Callable[[str], Path]) -> None:
        info = TorchBackend(open_checkpoint(checkpoint_of("qwen3")), device="cpu").info
        assert info.num_kv_blocks == (1 << 30) // info.kv_block_bytes


class TestLastLayer:
    def test_a_prefill_alone_computes_no_logits(self, backend: TorchBackend) -> None:
        output = backend.forward(prefill_batch(PREFIXES))
        assert output.label_logits.shape == (0, 3)
        assert output.logsumexp is None


class TestStart:
    def test_blocks_may_be_read_before_anybody_waits(self, backend: TorchBackend) -> None:
        prefixes = PREFIXES[:1]
        running = backend.start(prefill_batch(prefixes))
        extended = backend.start(extend_batch(ITEMS, [0] * 6, [running.blocks]))
        expected = backend.forward(extend_batch(ITEMS, [0] * 6, prefill(backend, prefixes)))
        assert np.array_equal(extended.wait().label_logits, expected.label_logits)
        assert running.wait().blocks == running.blocks

    @pytest.mark.gpu
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # is a prototype, says PyTorch 2.11
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_it_does_not_wait_for_a_gpu(self, checkpoint_of: Callable[[str], Path], dtype: str) -> None:
        backend = TorchBackend(open_checkpoint(checkpoint_of("medium")), dtype=dtype, device="cuda")
        expected = self.chain(backend).wait()  # kernels are compiled
        torch.cuda.set_sync_debug_mode("error")
        try:
            running = self.chain(backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert np.array_equal(running.wait().label_logits, expected.label_logits)

    @staticmethod
    def chain(backend: TorchBackend) -> RunningForward:
        """A prefill, another one that goes on from it, items."""
        first = backend.start(prefill_batch([LONG_PREFIX[:256]]))
        first.wait()  # without score tokens it has nothing to wait for
        second = backend.start(prefill_batch([LONG_PREFIX], [first.blocks]))
        return backend.start(extend_batch(ITEMS, [0] * 6, [(*first.blocks, *second.blocks)]))


class TestStepTokens:
    def test_they_grow_with_the_threads_up_to_the_budget(self, checkpoint_of: Callable[[str], Path]) -> None:
        checkpoint, at_start = open_checkpoint(checkpoint_of("qwen3")), torch.get_num_threads()
        try:
            found = []
            for num_threads, budget in ((1, None), (32, None), (32, 3000)):
                torch.set_num_threads(num_threads)
                found.append(TorchBackend(checkpoint, device="cpu", token_budget=budget).info.step_tokens)
        finally:
            torch.set_num_threads(at_start)
        assert found == [2048, 8192, 3000]


class TestThreads:
    @pytest.mark.parametrize("model", ["medium", "medium-gemma"])
    def test_bits_do_not_depend_on_the_number_of_threads(
        self, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, model: str
    ) -> None:
        """Nor on what they share: tiles or, as on ARM, operations. Without units for bfloat16, x86-64 multiplies with
        MKL, which adds in another order on several threads: there operations are never split."""
        at_start = torch.get_num_threads()
        found, shared = [], [(1, False), (3, False)]
        if devices.gemms_take_all_cores() or torch.bfloat16 in devices.native_cpu_dtypes():
            shared.append((3, True))
        try:
            for num_threads, splits_operations in shared:
                torch.set_num_threads(num_threads)
                monkeypatch.setattr(backend_module, "gemms_take_all_cores", partial(bool, splits_operations))
                backend = TorchBackend(open_checkpoint(checkpoint_of(model)), dtype="bfloat16", device="cpu")
                prefixes = prefill(backend, PREFIXES)
                found.append(backend.forward(extend_batch(ITEMS, READS, prefixes)))
                assert torch.get_num_threads() == num_threads, "the caller's setting is left alone"
        finally:
            torch.set_num_threads(at_start)
        for other in found[1:]:
            assert np.array_equal(other.label_logits, found[0].label_logits)
            assert other.logsumexp is not None
            assert found[0].logsumexp is not None
            assert np.array_equal(other.logsumexp, found[0].logsumexp)

    @pytest.mark.parametrize(
        ("model", "dtype", "counts"),
        [
            ("medium", "float32", (1, 3)),
            pytest.param("medium", "float32", (1, 2, 4), marks=pytest.mark.slow),
            pytest.param("medium", "bfloat16", (1, 2, 3, 4), marks=pytest.mark.slow),
            pytest.param("embedded", "float32", (1, 2, 3, 4), marks=pytest.mark.slow),
            pytest.param("embedded", "bfloat16", (1, 2, 3, 4), marks=pytest.mark.slow),
        ],
    )
    def test_nor_do_those_of_a_process_that_begins_with_them(
        self, checkpoint_of: Callable[[str], Path], model: str, dtype: str, counts: tuple[int, ...]
    ) -> None:
        """A tile of these widths has more elements than PyTorch lets one thread have: the others get a part."""
        folder = "" if model == "embedded" else str(checkpoint_of(model))
        found = []
        for count in counts:
            command = [sys.executable, "-c", SCORES_AND_THREADS, folder, dtype]
            env = {**os.environ, "OMP_NUM_THREADS": str(count), "MKL_DYNAMIC": "FALSE"}  # else no more than cores
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            answer = json.loads(done.stdout)
            assert answer["threads"] == count
            found.append(answer["scores"])
        assert all(each == found[0] for each in found[1:])


class TestNeighbourThatIsNotFinite:
    def test_it_stays_by_itself(self, checkpoint_of: Callable[[str], Path]) -> None:
        backend = TorchBackend(open_checkpoint(checkpoint_of("qwen3")), dtype="float32", device="cpu")
        prefixes = prefill(backend, PREFIXES)
        base = backend.forward(extend_batch(ITEMS, READS, prefixes)).label_logits
        backend._transformer.weights.embedding[511] = float("nan")  # a token that breaks every item with it
        broken = [*ITEMS[:2], np.full(40, 511, np.int32), *ITEMS[3:]]
        others = [0, 1, 3, 4, 5]
        logits = backend.forward(extend_batch(broken, READS, prefixes)).label_logits
        assert np.isnan(logits[2]).all()
        assert np.array_equal(logits[others], base[others])


class TestChoices:
    @pytest.fixture
    def folder(self, checkpoint_of: Callable[[str], Path]) -> Path:
        return checkpoint_of("qwen3")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": "int8"}, "unknown dtype 'int8'; expected auto, float32, bfloat16, float16"),
            ({"device": None}, "unknown device None; expected auto, cpu, cuda or cuda:N"),
            ({"device": "warp"}, "unknown device 'warp'; expected auto, cpu, cuda or cuda:N"),
            ({"device": "meta"}, "device 'meta' is not supported by the torch backend; expected cpu or cuda"),
        ],
    )
    def test_a_choice_that_cannot_be_is_named(self, folder: Path, options: dict[str, str], message: str) -> None:
        with pytest.raises(BackendError) as caught:
            TorchBackend(open_checkpoint(folder), **options)  # type: ignore[arg-type]  # what a caller might send
        assert str(caught.value) == message

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
    def test_cuda_where_there_is_none(self, folder: Path) -> None:
        with pytest.raises(BackendError, match=r"device 'cuda' was asked for, but PyTorch .* sees no CUDA device"):
            TorchBackend(open_checkpoint(folder), device="cuda")

    def test_what_cannot_be_captured_runs_all_the_same(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def capture(program: object) -> None:
            raise torch.OutOfMemoryError("too little memory for a graph")

        runner = SimpleNamespace(buckets=(256,), max_kv_blocks_read=None, wave_tokens=1, capture=capture)
        monkeypatch.setattr(backend_module, "choose_paged_runner", lambda *_, **__: runner)
        backend = TorchBackend(open_checkpoint(folder), device="cpu")
        assert "too little memory for a graph" in caplog.text
        backend._paged = None
        assert backend.forward(extend_batch(ITEMS, [0] * 6, prefill(backend, PREFIXES))).logsumexp is not None

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_every_dtype_runs(self, folder: Path, dtype: str) -> None:
        backend = TorchBackend(open_checkpoint(folder), dtype=dtype, device="cpu")
        prefixes = prefill(backend, PREFIXES)
        logits = backend.forward(extend_batch(ITEMS, READS, prefixes)).label_logits
        assert np.isfinite(logits).all()
        assert backend.info.dtype == dtype


@pytest.mark.gpu
class TestWideModelOnAGpu:
    """A layer of an 8-billion-parameter model's widths, where cuBLAS chooses among more kernels."""

    CONFIG = replace(
        QWEN3_06B, num_layers=1, model_size=4096, mlp_size=12_288, num_heads=32, num_kv_heads=8, vocab_size=20_000
    )
    ITEMS = RANDOM.integers(0, 20_000, (600, 20))
    QUERY = RANDOM.integers(0, 20_000, 300)

    def scores(self, backend: TorchBackend, num_items: int) -> list[list[float] | None]:
        body = {"query": self.QUERY, "items": list(self.ITEMS[:num_items]), "label_token_ids": [1, 2, 3]}
        request = parse_score_request({**body, "score_mode": "logit", "algorithm": "prefill_extend"})
        return ScoringEngine(EngineConfig("random"), Scheduler(backend), None).score(request).scores

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_within_a_bucket_by_default(self, dtype: str) -> None:
        backend = TorchBackend(random_checkpoint(self.CONFIG), dtype=dtype, device="cuda")
        fullest = self.scores(backend, 10)  # 500 tokens of 512 with the query; 200 of 256 without it
        for num_items in range(1, 10):
            assert self.scores(backend, num_items) == fullest[:num_items]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_across_buckets_with_batch_invariant(self, dtype: str) -> None:
        backend = TorchBackend(random_checkpoint(self.CONFIG), dtype=dtype, device="cuda", batch_invariant=True)
        fullest = self.scores(backend, 600)
        for num_items in (1, 5, 17, 64, 200):
            assert self.scores(backend, num_items) == fullest[:num_items]
