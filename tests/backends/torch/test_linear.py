"""Linear layers: packed weights give the GEMMs of plain ones, and row tiles cover all rows in sizes that are exact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.backends.torch import linear as linear_module
from prefixwise.backends.torch.cuda.capture import Capture, CapturedRows
from prefixwise.backends.torch.devices import has_onednn
from prefixwise.backends.torch.head_gemms import (
    CUDA_ROW_TILE,
    CUDA_VOCAB_TILE,
    HEAD_ROW_TILES,
    LABEL_TILE,
    MAX_LABEL_SETS,
    VOCAB_TILE,
    LabelHead,
    exact_head_tiles,
    logsumexp,
    score_vocabulary,
)
from prefixwise.backends.torch.heads import Heads
from prefixwise.backends.torch.linear import (
    can_pack,
    cut_evenly,
    cut_rows,
    exact_few_rows,
    exact_row_counts,
    is_exact,
    linear,
    pack_weights,
)
from prefixwise.backends.torch.weights import LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers

NAMES = ("qkv", "o", "gate_up", "down")
ROWS = 128
PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.zeros(1, dtype=dtype))]


def weights_of(dtype: torch.dtype, size: int = 64) -> ModelWeights:
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).to(dtype)

    layers = tuple(
        LayerWeights(
            attention_norm=torch.ones(size),
            qkv=matrix(4 * size, size),
            qkv_bias=None,
            qk_norm=None,
            o=matrix(size, 2 * size),
            mlp_norm=torch.ones(size),
            gate_up=matrix(6 * size, size),
            down=matrix(size, 3 * size),
        )
        for _ in range(2)
    )
    embedding = matrix(10, size)
    return ModelWeights(embedding, layers, torch.ones(size), embedding)


@pytest.mark.skipif(not has_onednn(), reason="packing is oneDNN's")
def test_float32_is_packed_everywhere() -> None:
    assert torch.float32 in PACKED


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("size", [64, 96, 576])
def test_packed_weights_give_the_gemms_of_plain_ones(size: int, dtype: torch.dtype) -> None:
    """Up to the rounding of the result: the sums may be in another order."""
    plain = weights_of(dtype, size)
    packed = pack_weights(plain, ROWS, Workers(2))
    for before, after in zip(plain.layers, packed.layers, strict=True):
        for name in NAMES:
            weight, packed_weight = getattr(before, name), getattr(after, name)
            assert packed_weight.is_mkldnn
            x, bias = torch.randn(ROWS, weight.shape[1]).to(dtype), torch.randn(len(weight)).to(dtype)
            for chosen in (None, bias):
                exact = F.linear(x.double(), weight.double(), None if chosen is None else chosen.double())
                error = (linear(x, packed_weight, chosen) - exact).abs()
                sums = (
                    torch.finfo(torch.float32).eps * weight.shape[1] * F.linear(x.double().abs(), weight.double().abs())
                )
                assert (error <= torch.finfo(dtype).eps * exact.abs() + sums).all()
    assert packed.embedding is plain.embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_dtypes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(linear_module, "native_cpu_dtypes", lambda: frozenset({torch.float32}))
    weights = weights_of(dtype)
    assert pack_weights(weights, ROWS, Workers(None)) is weights


def test_a_pytorch_that_cannot_pack_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(linear_module, "_pack", refuse)
    weights = weights_of(torch.float32)
    with caplog.at_level(logging.WARNING, "prefixwise"):
        assert pack_weights(weights, ROWS, Workers(None)) is weights
    assert caplog.messages == [
        "PyTorch cannot pack weights here, so scoring is slower than it could be: no such operation"
    ]


def test_a_pytorch_that_packs_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_pack", lambda weight, num_rows: weight * 2)
    weights = weights_of(torch.float32)
    assert pack_weights(weights, ROWS, Workers(None)) is weights


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (1, 128, (128, 64, 32, 16)),
        (8, 128, (128, 64, 32, 16)),
        (1, 256, (256, 128, 64, 32, 16)),
        (64, 256, (256, 128, 64)),
        (100, 200, (128,)),
    ],
)
def test_tiles_have_other_row_counts_only_where_that_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, least: int, most: int, expected: tuple[int, ...]
) -> None:
    """Where GEMMs of fewer rows than `least` and of more than `most` have other bits."""
    weights = weights_of(torch.float32)

    def by_number_of_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x[:, :1] * weight[0, 0] + 1e-3 * (not least <= len(x) <= most)

    monkeypatch.setattr(linear_module, "linear", by_number_of_rows)
    assert exact_row_counts(weights.layers[0], ROWS, torch.float32) == expected
    few = tuple(count for count in (4, 8, 12) if count >= least)
    assert exact_few_rows(weights.layers[0], ROWS, torch.float32) == few
    for count in (16, 48, 112, 144, 240):
        assert is_exact(weights.layers[0], ROWS, torch.float32, count) == (least <= count <= most)


def test_an_odd_number_of_rows_has_no_half() -> None:
    assert set(exact_row_counts(weights_of(torch.float32).layers[0], 7, torch.float32)) <= {14, 7}


TILE_SIZES = st.sampled_from([(1,), (7,), (128,), (256, 128), (128, 64), (256, 128, 64)])


@given(num_rows=st.integers(0, 5000), sizes=TILE_SIZES, threads=st.integers(1, 70))
def test_every_row_is_in_one_tile(num_rows: int, sizes: tuple[int, ...], threads: int) -> None:
    tiles = cut_rows(num_rows, sizes, threads)
    edges = [0, *(stop for _, stop in tiles)]
    assert [start for start, _ in tiles] == edges[:-1]
    assert edges[-1] == -(-num_rows // sizes[-1]) * sizes[-1]
    assert {stop - start for start, stop in tiles} <= set(sizes)


@given(num_rows=st.integers(0, 5000), sizes=TILE_SIZES, threads=st.integers(1, 70))
def test_even_tiles_hold_every_row_and_differ_by_one_unit(num_rows: int, sizes: tuple[int, ...], threads: int) -> None:
    tiles = cut_evenly(num_rows, sizes, threads)
    edges = [0, *(stop for _, stop in tiles)]
    assert [start for start, _ in tiles] == edges[:-1]
    assert edges[-1] == -(-num_rows // sizes[-1]) * sizes[-1]
    largest = num_rows // (sizes[0] * threads) * threads
    counts = [stop - start for start, stop in tiles]
    assert counts[:largest] == [sizes[0]] * largest
    rest = counts[largest:]
    assert len(rest) <= threads
    assert not rest or (max(rest) - min(rest) <= sizes[-1] and max(rest) <= sizes[0])


@pytest.mark.parametrize(
    ("num_units", "threads", "expected"),
    [
        (19, 2, [4, 4, 4, 4, 2, 1]),
        (10, 2, [4, 4, 1, 1]),
        (7, 2, [4, 2, 1]),
        (3, 2, [2, 1]),
        (2, 2, [1, 1]),
        (1, 2, [1]),
        (19, 16, [2] * 9 + [1]),
        (11, 1, [4, 4, 2, 1]),
    ],
)
def test_threads_get_an_equal_share(num_units: int, threads: int, expected: list[int]) -> None:
    tiles = cut_rows(64 * num_units - 5, (256, 128, 64), threads)
    assert [(stop - start) // 64 for start, stop in tiles] == expected


def test_a_row_s_logits_do_not_depend_on_the_number_of_rows() -> None:
    """Nor does its log-sum-exp: few rows take the smaller of the head's tiles."""
    random = torch.Generator().manual_seed(3)
    head, hidden = torch.randn(VOCAB_TILE + 40, 96, generator=random), torch.randn(70, 96, generator=random)
    workers, tiles = Workers(None), exact_head_tiles(head)
    labels = np.tile(np.array([5, VOCAB_TILE + 39], np.int32), (70, 1))
    assert tiles[0] == HEAD_ROW_TILES[0]
    label_head = LabelHead(head, tiles)
    all_logits, all_lse = label_head(hidden, labels), logsumexp(hidden, head, workers, tiles)
    assert torch.allclose(all_lse, torch.logsumexp(hidden @ head.T, -1))
    for count in (1, 2, 16, 17, 64, 65):
        assert torch.equal(label_head(hidden[:count], labels[:count]), all_logits[:count])
        assert torch.equal(logsumexp(hidden[:count], head, workers, tiles), all_lse[:count])


@pytest.fixture
def heads() -> Heads:
    head = torch.randn(300, 32, generator=torch.Generator().manual_seed(6))
    config = SimpleNamespace(logit_softcap=0.0)
    transformer: Any = SimpleNamespace(weights=SimpleNamespace(head=head), head_tiles=HEAD_ROW_TILES[:1], config=config)
    return Heads(transformer, Workers(None), None)


@torch.inference_mode()
def test_the_log_sum_exp_of_few_rows_is_a_cuda_graph(heads: Heads) -> None:
    """Here one that runs its program again."""
    num_replays = 0

    def capture(program: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        result = program()

        def replay() -> None:
            nonlocal num_replays
            num_replays += 1
            result.copy_(program())

        return SimpleNamespace(replay=replay), result

    batch: Any = SimpleNamespace(lora_slots=None)
    hidden = torch.randn(CUDA_ROW_TILE + 1, 32, generator=torch.Generator().manual_seed(7))
    expected = heads.logsumexp(batch, hidden)
    heads.capture(cast(Capture, capture))
    for num_rows, is_replayed in ((CUDA_ROW_TILE, True), (1, True), (CUDA_ROW_TILE + 1, False)):
        before = num_replays
        assert torch.equal(heads.logsumexp(batch, hidden[:num_rows]), expected[:num_rows])
        assert num_replays == before + is_replayed


def test_a_log_sum_exp_that_cannot_be_captured_is_launched(heads: Heads, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    batch: Any = SimpleNamespace(lora_slots=None)
    expected = heads.logsumexp(batch, torch.ones(3, 32))
    heads.capture(cast(Capture, fail))
    assert "takes the host longer than it could: out of memory" in caplog.text
    assert torch.equal(heads.logsumexp(batch, torch.ones(3, 32)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary_on_a_gpu(dtype: torch.dtype) -> None:
    """As exact as float32 whatever the head's dtype, and the same bits for a row among any others."""
    torch.manual_seed(5)
    head = torch.randn(CUDA_VOCAB_TILE + 40, 1024, device="cuda").to(dtype)
    hidden, token_ids = torch.randn(600, 1024, device="cuda"), torch.randint(len(head), (600,), device="cuda")
    expected = hidden.double() @ head.double().T
    found = score_vocabulary(hidden, head, token_ids, 5, Workers(None), HEAD_ROW_TILES[:1])
    best = expected.topk(5)
    assert torch.equal(found.top_ids, best.indices)
    bound = 5e-4  # logits are up to 150, and a GEMM in float32 is off by 2e-4 there
    assert (found.top_logits - best.values).abs().max() < bound
    assert (found.token_logits - expected.gather(1, token_ids[:, None])[:, 0]).abs().max() < bound
    assert (found.logsumexp - expected.logsumexp(1)).abs().max() < bound

    def sums(rows: torch.Tensor) -> torch.Tensor:
        return logsumexp(rows, head, Workers(None), HEAD_ROW_TILES[:1])

    assert (sums(hidden) - expected.logsumexp(1)).abs().max() < bound
    captured = CapturedRows(Capture(hidden.device), sums, torch.zeros(256, 1024, device="cuda"))
    for rows in (slice(0, 256), slice(300, 310)):  # other rows are left behind the second
        assert torch.equal(captured(hidden[rows]), sums(hidden)[rows])
    for rows in (slice(0, 1), slice(599, 600), slice(100, 430)):
        some = score_vocabulary(hidden[rows], head, token_ids[rows], 5, Workers(None), HEAD_ROW_TILES[:1])
        assert all(torch.equal(one, each[rows]) for one, each in zip(some, found, strict=True))


def test_labels_have_the_same_logits_alone_and_beside_other_labels() -> None:
    """Where all rows have the same labels, their rows of the head are at hand; else they are gathered."""
    random = torch.Generator().manual_seed(4)
    head, hidden = torch.randn(300, 96, generator=random), torch.randn(70, 96, generator=random)
    label_head = LabelHead(head, exact_head_tiles(head))
    same = np.tile(np.array([7, 250, 7], np.int32), (70, 1))
    mixed = same.copy()
    mixed[40:] = [1, 2, 299]
    alone, beside = label_head(hidden, same), label_head(hidden, mixed)
    assert torch.equal(alone[:40], beside[:40])
    assert torch.allclose(beside[40:], (hidden @ head.T)[40:, [1, 2, 299]], atol=1e-4)
    assert torch.allclose(alone, (hidden @ head.T)[:, [7, 250, 7]], atol=1e-4)


def test_the_latest_sets_of_labels_are_at_hand_and_no_more() -> None:
    head, hidden = torch.randn(300, 16), torch.randn(3, 16)
    label_head = LabelHead(head, HEAD_ROW_TILES[:1])
    for label in range(2 * MAX_LABEL_SETS + 1):
        found = label_head(hidden, np.full((3, 1), label, np.int32))
        assert torch.allclose(found, hidden @ head[label : label + 1].T, atol=1e-4)
        assert len(label_head._known) <= MAX_LABEL_SETS
    many = np.tile(np.arange(LABEL_TILE + 1, dtype=np.int32), (3, 1))
    assert torch.allclose(label_head(hidden, many), hidden @ head[: LABEL_TILE + 1].T, atol=1e-4)
    assert len(label_head._known) <= MAX_LABEL_SETS
