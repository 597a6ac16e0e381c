from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from itemwise.backends.base import ForwardBatch, Layout, PrefixState
from itemwise.backends.torch.backend import TorchBackend, TorchPrefix
from itemwise.contract.errors import BackendError
from itemwise.contract.parse import parse_score_request
from itemwise.contract.ragged import Int32Array, ranges, starts_from_lens
from itemwise.engine.engine import EngineConfig, ScoringEngine
from itemwise.models.checkpoint import open_checkpoint

RANDOM = np.random.default_rng(5)
PREFIXES = [RANDOM.integers(0, 512, length).astype(np.int32) for length in (300, 40, 1)]
TAILS = [RANDOM.integers(0, 512, length).astype(np.int32) for length in (20, 3, 140, 20, 1, 7)]
READS = [0, 1, 0, 2, 1, 1]  # which prefix each tail reads
LABELS = np.array([[3, 5, 300]], np.int32)


def segments_batch(
    pieces: list[Int32Array], prefix_index: list[int], prefixes: tuple[PrefixState, ...], *, score: bool
) -> ForwardBatch:
    lens = np.array([len(piece) for piece in pieces], np.int64)
    prefix_lens = np.array([prefixes[i].num_tokens if i >= 0 else 0 for i in prefix_index], np.int64)
    starts = starts_from_lens(lens)
    return ForwardBatch(
        layout=Layout.EXTEND if prefixes else Layout.CAUSAL,
        token_ids=np.concatenate(pieces),
        positions=ranges(prefix_lens, lens).astype(np.int32),
        segment_starts=starts,
        prefix_index=np.array(prefix_index),
        prefix_lens=prefix_lens,
        prefixes=prefixes,
        row_starts=starts,
        score_tokens=starts[1:] - 1 if score else np.zeros(0, np.int64),
        label_ids=np.repeat(LABELS, len(pieces), 0) if score else np.zeros((0, 3), np.int32),
        need_normalizers=score,
        keep_segments=() if score else tuple(range(len(pieces))),
    )


def prefill(backend: TorchBackend, pieces: list[Int32Array]) -> tuple[PrefixState, ...]:
    return backend.forward(segments_batch(pieces, [-1] * len(pieces), (), score=False)).prefixes


@pytest.fixture(
    scope="module", params=["cpu-float32", "cpu-bfloat16", pytest.param("cuda-bfloat16", marks=pytest.mark.gpu)]
)
def backend(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> TorchBackend:
    device, dtype = request.param.split("-")
    return TorchBackend(open_checkpoint(checkpoint_of("medium")), dtype=dtype, device=device, batch_invariant=True)


class TestSeveralPrefixes:
    def test_items_of_several_requests_share_a_forward_and_no_bit(self, backend: TorchBackend) -> None:
        prefixes = prefill(backend, PREFIXES)
        together = backend.forward(segments_batch(TAILS, READS, prefixes, score=True))
        for number, (tail, reads) in enumerate(zip(TAILS, READS, strict=True)):
            (lone_prefix,) = prefill(backend, [PREFIXES[reads]])
            alone = backend.forward(segments_batch([tail], [0], (lone_prefix,), score=True))
            assert np.array_equal(alone.label_logits[0], together.label_logits[number])
            assert alone.log_normalizers is not None
            assert together.log_normalizers is not None
            assert alone.log_normalizers[0] == together.log_normalizers[number]

    def test_labels_of_another_request_move_no_bit(self, backend: TorchBackend) -> None:
        prefixes = prefill(backend, PREFIXES)
        batch = segments_batch(TAILS, READS, prefixes, score=True)
        others = batch.label_ids.copy()
        others[1:] = RANDOM.integers(0, 512, others[1:].shape)
        mixed = backend.forward(replace(batch, label_ids=others))
        assert np.array_equal(mixed.label_logits[0], backend.forward(batch).label_logits[0])

    def test_a_prefix_knows_its_size(self, backend: TorchBackend) -> None:
        config = backend.config
        (prefix, _, _) = prefill(backend, PREFIXES)
        item_bytes = 4 if backend.info.dtype == "float32" else 2
        assert prefix.num_tokens == 300
        assert prefix.num_bytes == 2 * config.num_layers * 300 * config.num_kv_heads * config.head_size * item_bytes

    def test_dropping_one_prefix_frees_its_memory(self, backend: TorchBackend) -> None:
        for prefix in prefill(backend, PREFIXES):
            assert isinstance(prefix, TorchPrefix)
            assert all(k.untyped_storage().nbytes() == k.nbytes for k, _ in prefix.layers)


class TestLastLayer:
    def test_a_prefill_alone_computes_no_logits(self, backend: TorchBackend) -> None:
        output = backend.forward(segments_batch(PREFIXES, [-1] * 3, (), score=False))
        assert output.label_logits.shape == (0, 3)
        assert output.log_normalizers is None


class TestThreads:
    def test_bits_do_not_depend_on_the_number_of_threads(self, checkpoint_of: Callable[[str], Path]) -> None:
        at_start = torch.get_num_threads()
        found = []
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                backend = TorchBackend(open_checkpoint(checkpoint_of("medium")), dtype="bfloat16", device="cpu")
                prefixes = prefill(backend, PREFIXES)
                found.append(backend.forward(segments_batch(TAILS, READS, prefixes, score=True)))
                assert torch.get_num_threads() == num_threads, "the caller's setting is left alone"
        finally:
            torch.set_num_threads(at_start)
        for other in found[1:]:
            assert np.array_equal(other.label_logits, found[0].label_logits)
            assert other.log_normalizers is not None
            assert found[0].log_normalizers is not None
            assert np.array_equal(other.log_normalizers, found[0].log_normalizers)


class TestNeighbourThatIsNotFinite:
    def test_it_stays_by_itself(self, checkpoint_of: Callable[[str], Path]) -> None:
        backend = TorchBackend(open_checkpoint(checkpoint_of("qwen3")), dtype="float32", device="cpu")
        prefixes = prefill(backend, PREFIXES)
        base = backend.forward(segments_batch(TAILS, READS, prefixes, score=True)).label_logits
        backend._transformer.weights.embedding[511] = float("nan")  # a token that breaks whoever uses it
        broken = [*TAILS[:2], np.full(40, 511, np.int32), *TAILS[3:]]
        others = [0, 1, 3, 4, 5]
        logits = backend.forward(segments_batch(broken, READS, prefixes, score=True)).label_logits
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

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_every_dtype_runs(self, folder: Path, dtype: str) -> None:
        backend = TorchBackend(open_checkpoint(folder), dtype=dtype, device="cpu")
        prefixes = prefill(backend, PREFIXES)
        logits = backend.forward(segments_batch(TAILS, READS, prefixes, score=True)).label_logits
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
        return ScoringEngine(EngineConfig("random"), backend, None).score(request).scores

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_within_a_bucket_by_default(self, dtype: str) -> None:
        backend = TorchBackend(random_checkpoint(self.CONFIG), dtype=dtype, device="cuda")
        fullest = self.scores(backend, 12)  # 240 tokens of 256
        for num_items in range(1, 12):
            assert self.scores(backend, num_items) == fullest[:num_items]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_across_buckets_with_batch_invariant(self, dtype: str) -> None:
        backend = TorchBackend(random_checkpoint(self.CONFIG), dtype=dtype, device="cuda", batch_invariant=True)
        fullest = self.scores(backend, 600)
        for num_items in (1, 5, 17, 64, 200):
            assert self.scores(backend, num_items) == fullest[:num_items]
