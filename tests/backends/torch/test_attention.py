from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from prefixwise.backends.torch import varlen
from prefixwise.backends.torch.attention import Attention, QueryCut, TiledAttention, cut_queries, full_attention
from prefixwise.backends.torch.devices import has_openblas, native_cpu_dtypes
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps
from prefixwise.backends.torch.few_tiles import few_tiles
from prefixwise.backends.torch.kv_blocks import KeysValues
from prefixwise.backends.torch.softmax import NEG_INF, ScoreRule, masked_softmax, merge
from prefixwise.backends.torch.tiles import FullRange
from prefixwise.backends.torch.varlen import VarlenAttention
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.batch import ForwardBatch, Layout, MaskImpl
from tests.attention_cases import (
    CASE_NAMED,
    CASES,
    LAYOUT_CASES,
    SCORINGS,
    AttentionCase,
    AttentionInputs,
    Floats,
    Implementation,
    Scoring,
    check,
    check_alone,
    make_batch,
    make_inputs,
)
from tests.backends.torch.flash_on_a_cpu import flash_on_a_cpu

# float32: PyTorch's own attention is 2e-6 off on the first case, and longer heads add up more.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
PACKED = [case for case in CASES if case.layout is Layout.PACKED]
IN_BATCH = AttentionCase("a prefix in the batch", (8, 2, 2), (-1, 0, 0), (0, 8, 8), batch_prefixes=(0,))
FEW = [
    IN_BATCH,
    replace(IN_BATCH, name="9 query heads on 3 KV heads", num_heads=9, num_kv_heads=3),
    *(CASE_NAMED[name] for name in ("items of one token", "a prefix of one token")),
    AttentionCase("no prefix, several widths", (20, 5, 17)),
]

AttentionClass = Callable[[ForwardBatch, torch.device, int, torch.dtype], Attention]
WORKERS = Workers(2)


def tiled(batch: ForwardBatch, device: torch.device, heads_per_kv: int, dtype: torch.dtype) -> Attention:
    return TiledAttention(batch, device, heads_per_kv, WORKERS, dtype=dtype)


def unpadded(batch: ForwardBatch, device: torch.device, heads_per_kv: int, dtype: torch.dtype) -> Attention:
    return TiledAttention(batch, device, heads_per_kv, WORKERS, pads_tiles=False, dtype=dtype)


def tiled_with(scoring: Scoring, *, pads_tiles: bool = True) -> AttentionClass:
    """For layers with and without the window."""
    rule, windows = ScoreRule(scoring.scale, scoring.softcap), (0, scoring.window)
    return lambda batch, device, heads_per_kv, dtype: TiledAttention(
        batch, device, heads_per_kv, WORKERS, pads_tiles=pads_tiles, windows=windows, rule=rule, dtype=dtype
    )


EVERY_DAY = ("several prefixes", "ragged items over one prefix", "packed sequences")


def is_slow(test: str, parameters: dict[str, Any]) -> bool:
    """A CPU that emulates a dtype takes ten times as long in it, and the backend attends in float32 there: a few cases
    will do."""
    case, name = parameters.get("case"), parameters.get("name", EVERY_DAY[0])
    is_emulated = parameters.get("dtype", torch.float32) not in native_cpu_dtypes()
    return is_emulated and "varlen_run" not in parameters and (case.name if case else name) not in EVERY_DAY


# How tiles are cut on a CPU, for every dtype that they are cut so for.
ON_A_CPU = [*((tiled, dtype) for dtype in TOLERANCES), (unpadded, torch.bfloat16)]


def varlen_with(elementwise_ops: ElementwiseOps, *, reads_in_place: bool = varlen.READS_IN_PLACE) -> AttentionClass:
    return lambda batch, device, *_: VarlenAttention(batch, device, elementwise_ops, reads_in_place=reads_in_place)


def implementation(
    attention: AttentionClass, dtype: torch.dtype, device: str = "cpu", window: int = 0
) -> Implementation:
    def run(batch: ForwardBatch, inputs: AttentionInputs) -> Floats:
        def move(values: Floats) -> torch.Tensor:
            return torch.from_numpy(values).to(device, dtype)

        attend = attention(batch, torch.device(device), inputs.q.shape[1] // inputs.k.shape[1], dtype)
        cached: KeysValues | None = None
        if inputs.cached:
            keys, values = (np.concatenate(each) for each in zip(*inputs.cached, strict=True))
            cached = move(keys), move(values)
        qkv = torch.cat([move(each) for each in (inputs.q, inputs.k, inputs.v)], 1)
        output: Floats = attend(qkv, inputs.q.shape[1], cached, window).float().cpu().numpy()
        return output

    return run


def segments_of(lens: tuple[int, ...]) -> ForwardBatch:
    """Sequences that see themselves alone."""
    return make_batch(AttentionCase("sequences", lens, layout=Layout.CAUSAL))


class TestTiledAttention:
    @pytest.mark.parametrize(("attention", "dtype"), ON_A_CPU)
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_on_a_cpu(self, case: AttentionCase, attention: AttentionClass, dtype: torch.dtype) -> None:
        check(implementation(attention, dtype), case, TOLERANCES[dtype])

    @pytest.mark.gpu
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_float32_on_a_gpu(self, case: AttentionCase) -> None:
        check(implementation(tiled, torch.float32, "cuda"), case, TOLERANCES[torch.float32])

    @pytest.mark.parametrize(("attention", "dtype"), ON_A_CPU)
    @pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
    def test_dense_mask_gives_the_same_bits(
        self, case: AttentionCase, attention: AttentionClass, dtype: torch.dtype
    ) -> None:
        run, inputs = implementation(attention, dtype), make_inputs(case)
        masks: tuple[MaskImpl, MaskImpl] = ("dense", "segment")
        dense, segment = (run(make_batch(case, mask), inputs) for mask in masks)
        assert np.array_equal(dense, segment)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, *([torch.float32] if has_openblas() else [])])
    @pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 20, 31, 33, 64, 100, 128])
    def test_an_unpadded_tile_has_the_same_bits_wherever_it_stands(self, length: int, dtype: torch.dtype) -> None:
        """Alone, first, or last of many, beside longer and shorter ones."""
        random = np.random.default_rng(length)
        others = (3, length, length + 9 if length < 100 else 90, length, 1)
        lens = (*others, length)
        qkv = torch.from_numpy(random.normal(size=(sum(lens), 10, 64))).to(dtype)
        among = unpadded(segments_of(lens), torch.device("cpu"), 3, dtype)(qkv, 6, None)[-length:]
        alone = unpadded(segments_of((length,)), torch.device("cpu"), 3, dtype)(qkv[-length:], 6, None)
        assert torch.equal(among, alone)

    def test_dense_mask_sees_what_the_tiles_leave_out(self) -> None:
        """The dense path scores every pair: a key that the array shows and no tile visits must count."""
        from prefixwise.backends.torch.dense_mask import DenseMask

        batch, inputs = make_batch(PACKED[0], "dense"), make_inputs(PACKED[0])
        q, k, v = (torch.from_numpy(each) for each in (inputs.q, inputs.k, inputs.v))
        no_tiles = DenseMask(batch, [], [], torch.device("cpu"))
        out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], NEG_INF)
        no_tiles.attend_rest(q, k, v, (out, lse))
        expected = tiled(batch, torch.device("cpu"), 2, q.dtype)(torch.cat([q, k, v], 1), q.shape[1], None)
        assert torch.allclose(out[: batch.num_tokens], expected[: batch.num_tokens], atol=1e-5)

    @pytest.mark.parametrize(("attention", "dtype"), ON_A_CPU)
    def test_a_pytorch_whose_flash_attention_has_no_groups_gives_the_same_bits(
        self, monkeypatch: pytest.MonkeyPatch, attention: AttentionClass, dtype: torch.dtype
    ) -> None:
        case = CASE_NAMED["9 query heads on 3 KV heads of 96"]
        batch, inputs, run = make_batch(case), make_inputs(case), implementation(attention, dtype)
        expected = run(batch, inputs)
        monkeypatch.setattr("prefixwise.backends.torch.attention._flash_knows_groups", lambda: False)
        np.testing.assert_array_equal(run(batch, inputs), expected)

    @pytest.mark.parametrize(("padded", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
    @pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
    def test_few_tiles_give_the_same_bits(self, case: AttentionCase, dtype: torch.dtype, padded: bool) -> None:
        def few(batch: ForwardBatch, device: torch.device, heads_per_kv: int, dtype: torch.dtype) -> Attention:
            cut = QueryCut(heads_per_kv, 2, device, dtype, is_flash=True)
            found = few_tiles(batch, case.num_kv_heads, cut, padded=padded)
            assert found is not None
            return found

        run, batch, inputs = implementation(few, dtype), make_batch(case), make_inputs(case)
        expected = implementation(tiled if padded else unpadded, dtype)(batch, inputs)
        np.testing.assert_array_equal(run(batch, inputs)[: batch.num_tokens], expected[: batch.num_tokens])
        check(run, case, TOLERANCES[dtype])

    @pytest.mark.parametrize("name", ["one causal sequence", "several prefixes", "a long prefix of an odd length"])
    def test_many_tiles_are_not_few(self, name: str) -> None:
        case = CASE_NAMED[name]
        cut = QueryCut(2, 2, torch.device("cpu"), torch.float32, is_flash=True)
        assert few_tiles(make_batch(case), 2, cut, padded=True) is None

    def test_padding_tokens_get_zero(self) -> None:
        case = CASE_NAMED["one causal sequence"]
        output = implementation(tiled, torch.float32)(make_batch(case), make_inputs(case))
        assert not output[sum(case.segment_lens) :].any()


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
class TestScorings:
    """Sliding windows, capped scores, other scales."""

    @pytest.mark.parametrize(
        ("dtype", "pads_tiles"),
        [(torch.float32, True), (torch.bfloat16, False), *([(torch.float32, False)] if has_openblas() else [])],
    )
    @pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
    def test_on_a_cpu(self, case: AttentionCase, scoring: Scoring, dtype: torch.dtype, pads_tiles: bool) -> None:
        attention = tiled_with(scoring, pads_tiles=pads_tiles)
        run = implementation(attention, dtype, window=scoring.window)
        check(run, case, TOLERANCES[dtype], scoring=scoring)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
    def test_dense_mask_gives_the_same_bits(self, case: AttentionCase, scoring: Scoring, dtype: torch.dtype) -> None:
        run, inputs = implementation(tiled_with(scoring), dtype, window=scoring.window), make_inputs(case)
        masks: tuple[MaskImpl, MaskImpl] = ("dense", "segment")
        dense, segment = (run(make_batch(case, mask), inputs) for mask in masks)
        assert np.array_equal(dense, segment)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["ragged items over one prefix", "long items", "a long prefix of an odd length"])
    def test_a_segment_alone_gives_the_bits_it_has_beside_others(
        self, name: str, scoring: Scoring, dtype: torch.dtype
    ) -> None:
        check_alone(implementation(tiled_with(scoring), dtype, window=scoring.window), CASE_NAMED[name])


@pytest.mark.parametrize("window", [1, 100, 128, 300])
def test_keys_outside_the_window_are_not_read(window: int) -> None:
    """Keys and values of NaN would show; blocks that a window cuts are masked, all before them are skipped."""
    case = CASE_NAMED["a long prefix of an odd length"]
    batch, inputs = make_batch(case), make_inputs(case)
    attention = tiled_with(Scoring(window=window))
    expected = implementation(attention, torch.float32, window=window)(batch, inputs)
    first = (min(case.prefix_lens) - window + 1) // 128 * 128
    for array in inputs.cached[0]:
        array[:first] = np.nan
    found = implementation(attention, torch.float32, window=window)(batch, inputs)
    assert np.array_equal(found[: batch.num_tokens], expected[: batch.num_tokens])


@pytest.fixture(
    params=["cpu-plain", *(pytest.param(f"cuda-{ops}", marks=pytest.mark.gpu) for ops in ("plain", "fused"))]
)
def varlen_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VarlenRun:
    """On a CPU with a stand-in for the device's kernel, so that all around it is tested there too."""
    device, ops = request.param.split("-")
    if device == "cpu":
        monkeypatch.setattr(varlen, "flash", flash_on_a_cpu)
    elementwise_ops: ElementwiseOps = PLAIN
    if ops == "fused":
        from prefixwise.backends.torch.cuda.fused_elementwise import FusedElementwiseOps

        elementwise_ops = FusedElementwiseOps()

    def run(dtype: torch.dtype, *, reads_in_place: bool = varlen.READS_IN_PLACE) -> Implementation:
        return implementation(varlen_with(elementwise_ops, reads_in_place=reads_in_place), dtype, device)

    return run


class VarlenRun(Protocol):
    def __call__(self, dtype: torch.dtype, *, reads_in_place: bool = ...) -> Implementation: ...


class TestVarlenAttention:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_is_right(self, varlen_run: VarlenRun, case: AttentionCase, dtype: torch.dtype) -> None:
        check(varlen_run(dtype), case, TOLERANCES[dtype])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_keys_read_in_place_give_the_bits_of_copied_ones(
        self, varlen_run: VarlenRun, case: AttentionCase, dtype: torch.dtype
    ) -> None:
        batch, inputs = make_batch(case), make_inputs(case)
        copied, in_place = (varlen_run(dtype, reads_in_place=each)(batch, inputs) for each in (False, True))
        assert np.array_equal(copied[: batch.num_tokens], in_place[: batch.num_tokens])

    @pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
    def test_dense_mask_gives_the_same_bits(self, varlen_run: VarlenRun, case: AttentionCase) -> None:
        run, inputs = varlen_run(torch.bfloat16), make_inputs(case)
        masks: tuple[MaskImpl, MaskImpl] = ("dense", "segment")
        dense, segment = (run(make_batch(case, mask), inputs) for mask in masks)
        assert np.array_equal(dense, segment)

    def test_padding_tokens_get_zero(self, varlen_run: VarlenRun) -> None:
        for case in CASE_NAMED["one causal sequence"], CASE_NAMED["ragged items over one prefix"]:
            output = varlen_run(torch.bfloat16)(make_batch(case), make_inputs(case))
            assert not output[sum(case.segment_lens) :].any()


@pytest.mark.parametrize("kind", ["tiled", "varlen"])
def test_bidirectional_attention_sees_the_whole_segment(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain softmax, and bit for bit as a segment alone."""
    monkeypatch.setattr(varlen, "flash", flash_on_a_cpu)
    case = CASE_NAMED["causal sequences of ragged lengths"]
    batch, inputs, device = make_batch(case), make_inputs(case), torch.device("cpu")
    q, k, v = (torch.from_numpy(each) for each in (inputs.q, inputs.k, inputs.v))

    def attend(batch: ForwardBatch, tokens: slice) -> torch.Tensor:
        if kind == "tiled":
            attention: Attention = TiledAttention(batch, device, 2, WORKERS, dtype=q.dtype, is_causal=False)
        else:
            attention = VarlenAttention(batch, device, is_causal=False)
        return attention(torch.cat([q, k, v], 1)[tokens], q.shape[1], None)

    together = attend(batch, slice(None))
    assert not together[batch.num_tokens :].any()
    for start, stop in pairwise(batch.segment_starts.tolist()):
        tokens = slice(start, stop)
        keys, values = (each[tokens].repeat_interleave(2, 1).transpose(0, 1) for each in (k, v))
        expected = torch.softmax(q[tokens].transpose(0, 1) @ keys.transpose(1, 2) / 8, -1) @ values
        assert (together[tokens] - expected.transpose(0, 1)).abs().max() < TOLERANCES[torch.float32]
        assert torch.equal(attend(segments_of((stop - start,)), tokens), together[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_keys", [5, 50, 100, 200, 300, 400, 997])
def test_a_row_of_a_full_range_has_the_same_bits_among_any_number_of_rows(num_keys: int, dtype: torch.dtype) -> None:
    cut = QueryCut(1, 1, torch.device("cpu"), dtype, is_flash=True)
    multiple, most = cut.full_rows
    random = torch.Generator().manual_seed(num_keys)
    for head_size in (32, 64, 128):
        q, keys, values = (
            torch.randn(shape, generator=random).to(dtype)
            for shape in ((2, most, head_size), (num_keys, 2, head_size), (num_keys, 2, head_size))
        )
        expected, expected_lse = full_attention(q, keys, values)
        for rows in (cut.least_rows, cut.least_rows + multiple, 192, 768):
            found, lse = full_attention(q[:, :rows], keys, values)
            assert torch.equal(found, expected[:, :rows]) and torch.equal(lse, expected_lse[:, :rows])


@pytest.mark.parametrize(
    ("num_tokens", "in_float32", "in_half"),
    [(1, [32], [64]), (20, [32, 32], [64]), (43, [96, 64], [96, 64]), (100, [160, 160], [160, 160])],
)
def test_gemms_of_a_full_range_share_its_rows(num_tokens: int, in_float32: list[int], in_half: list[int]) -> None:
    """Three query heads per KV head, two threads."""
    part = FullRange(np.arange(num_tokens), 0, 0, 300)
    for dtype, expected in ((torch.float32, in_float32), (torch.bfloat16, in_half), (torch.float16, in_half)):
        tiles = cut_queries([part], QueryCut(3, 2, torch.device("cpu"), dtype, is_flash=True))
        assert [tile.num_rows for tile in tiles] == expected


class TestNeighbours:
    @pytest.mark.parametrize("dtype", TOLERANCES)
    def test_a_segment_alone_gives_the_bits_it_has_beside_others(self, dtype: torch.dtype) -> None:
        check_alone(implementation(tiled, dtype), CASE_NAMED["ragged items over one prefix"])

    def test_a_neighbour_that_is_not_finite_stays_by_itself(self) -> None:
        case = PACKED[0]
        for mask in ("dense", "segment"):
            batch, inputs = make_batch(case, mask), make_inputs(case)
            run = implementation(tiled, torch.float32)
            base = run(batch, inputs)
            broken = slice(int(batch.segment_starts[1]), int(batch.segment_starts[2]))
            inputs.k[broken], inputs.v[broken] = np.nan, np.inf
            poisoned = run(batch, inputs)
            others = np.r_[0 : broken.start, broken.stop : batch.num_tokens]
            assert np.array_equal(poisoned[others], base[others]), mask


class TestMerge:
    def test_two_parts_give_the_softmax_over_both(self) -> None:
        torch.manual_seed(0)
        q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
        nothing = torch.zeros(3, 10, dtype=torch.bool)
        whole = masked_softmax(q, k, v, nothing)
        parts = [masked_softmax(q, k[:, :, part], v[:, :, part], nothing[:, part]) for part in (slice(4), slice(4, 10))]
        merged = merge(parts[0], parts[1])
        assert torch.allclose(merged[0], whole[0], atol=1e-6)
        assert torch.allclose(merged[1], whole[1], atol=1e-6)

    def test_a_part_that_saw_nothing_changes_no_bit(self) -> None:
        torch.manual_seed(0)
        part = (torch.randn(5, 8), torch.randn(5))
        nothing = (torch.zeros(5, 8), torch.full((5,), NEG_INF))
        for merged in (merge(part, nothing), merge(nothing, part)):
            assert torch.equal(merged[0], part[0])
            assert torch.equal(merged[1], part[1])

    def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity(self) -> None:
        out, lse = masked_softmax(
            torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(2, 3, dtype=torch.bool)
        )
        assert not out.any()
        assert (lse == NEG_INF).all()
