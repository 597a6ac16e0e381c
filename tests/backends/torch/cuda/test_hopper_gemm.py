"""GEMMs that activate or add the residual: on a Hopper GPU, and compiled for one where there is none."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.torch import kernel_choice
from prefixwise.backends.torch.backend import TorchBackend
from prefixwise.backends.torch.fp8 import FP8, fp8_linear
from prefixwise.forward.batch import Layout
from prefixwise.models.config import Activation
from tests.backends.torch.batches import sequences_batch

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MODEL = replace(QWEN3_06B, vocab_size=600, num_layers=3, max_context_len=4096)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="not a Hopper GPU")
class TestOnAGpu:
    """To the bit where a sum has no rounding, and of every number of rows."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    @pytest.mark.parametrize(("size", "inner"), [(3072, 1024), (384, 512), (9728, 2560)])
    def test_it_is_cublas_and_the_activation(
        self, size: int, inner: int, activation: Activation, dtype: torch.dtype
    ) -> None:
        from prefixwise.backends.torch.cuda.fused_elementwise import gate
        from prefixwise.backends.torch.cuda.hopper_gemm import gated_gemm

        x = torch.randint(-2, 3, (2304, inner), device="cuda").to(dtype)
        weight = torch.randint(-2, 3, (2 * size, inner), device="cuda").to(dtype) / 64
        for num_rows in (256, 2048, 2304):
            found, expected = x.new_full((num_rows, size + 8), float("nan")), x.new_empty(num_rows, size)
            gated_gemm(x[:num_rows], weight, activation, found)
            gate(F.linear(x[:num_rows], weight), activation, expected)
            assert torch.equal(found[:, :size], expected)
            assert found[:, size:].isnan().all(), "columns behind it are another's"

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_in_fp8_it_has_the_codes_and_scales_of_cublas_and_the_activation(self, activation: Activation) -> None:
        from prefixwise.backends.torch.cuda.fp8_kernels import gate_fp8, rescale
        from prefixwise.backends.torch.cuda.hopper_gemm import gated_gemm

        x, weight = (torch.randint(-2, 3, (size, 1024), device="cuda").to(FP8) for size in (2304, 6144))
        row_scales, scales = (0.05 * torch.rand(len(each), device="cuda") for each in (x, weight))
        row_scales *= 4 ** (torch.arange(2304, device="cuda") % 8)  # some rows do not fit a scale of 1
        expected, expected_scales = x.new_empty(2304, 3072), torch.empty_like(row_scales)
        gate_fp8(fp8_linear(x, row_scales, weight, scales), activation, expected, expected_scales)
        for num_rows in (256, 2000, 2304):
            found, found_scales = x.new_empty(num_rows, 3072), row_scales.new_empty(num_rows)
            exponents = torch.empty(96, num_rows, dtype=torch.uint8, device="cuda")
            gated_gemm(x[:num_rows], weight, activation, found, (row_scales[:num_rows], scales), exponents)
            rescale(found, exponents, found_scales)
            assert torch.equal(found.view(torch.uint8), expected[:num_rows].view(torch.uint8))
            assert torch.equal(found_scales, expected_scales[:num_rows])
        assert 0.2 < (expected_scales > 1).float().mean() < 0.8

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("size", "inner"), [(1024, 2048), (1024, 3072), (256, 512)])
    def test_it_adds_what_cublas_computes(self, size: int, inner: int, dtype: torch.dtype) -> None:
        from prefixwise.backends.torch.cuda.hopper_gemm import residual_gemm

        x = torch.randint(-2, 3, (8192, inner + 8), device="cuda").to(dtype)
        weight = torch.randint(-2, 3, (size, inner), device="cuda").to(dtype) / 64
        for num_rows in (1, 256, 1000, 6144, 8192):  # with 1,024 columns 192 tiles of 6,144 rows: some are halved
            found = torch.randn(num_rows + 1, size + 8, device="cuda").to(dtype)
            before = found.clone()
            residual_gemm(x[:num_rows], weight, found[:num_rows])
            expected = before[:num_rows, :size] + F.linear(x[:num_rows, :inner], weight)
            assert torch.equal(found[:num_rows, :size], expected)
            assert torch.equal(found[:, size:], before[:, size:]), "columns behind it are another's"
            assert torch.equal(found[num_rows], before[num_rows]), "and so is the row below"

    @pytest.mark.parametrize(("size", "inner"), [(1024, 2048), (1024, 3072), (256, 1024)])
    def test_in_fp8_it_adds_what_cublas_computes(self, size: int, inner: int) -> None:
        from prefixwise.backends.torch.cuda.hopper_gemm import residual_gemm

        x, weight = (torch.randint(-2, 3, (each, inner), device="cuda").to(FP8) for each in (8192, size))
        row_scales, scales = (0.05 * torch.rand(len(each), device="cuda") for each in (x, weight))
        for num_rows in (16, 256, 1008, 6144, 8192):
            found = torch.randn(num_rows + 1, size + 8, device="cuda").bfloat16()
            before = found.clone()
            residual_gemm(x[:num_rows], weight, found[:num_rows], (row_scales[:num_rows], scales))
            product = fp8_linear(x[:num_rows], row_scales[:num_rows], weight, scales)
            assert torch.equal(found[:num_rows, :size], before[:num_rows, :size] + product)
            assert torch.equal(found[:, size:], before[:, size:]), "columns behind it are another's"
            assert torch.equal(found[num_rows], before[num_rows]), "and so is the row below"

    @pytest.mark.parametrize("adds", [False, True])
    def test_a_row_has_the_same_bits_in_any_company(self, adds: bool) -> None:
        from prefixwise.backends.torch.cuda.hopper_gemm import gated_gemm, residual_gemm

        x = torch.randn(4096, 1024, device="cuda").bfloat16()
        weight = (0.02 * torch.randn(6144, 1024, device="cuda")).bfloat16()
        order = torch.randperm(4096, device="cuda")[:500]
        whole = torch.randn(4096, 6144 if adds else 3072, device="cuda").bfloat16()
        some = whole[order]
        for rows, out in ((x, whole), (x[order], some)):
            if adds:
                residual_gemm(rows, weight, out)
            else:
                gated_gemm(rows, weight, "silu", out)
        assert torch.equal(some, whole[order])

    @pytest.mark.parametrize("quantization", [None, "fp8"])
    def test_a_model_uses_them_for_many_rows_and_has_the_bits_of_few(
        self, quantization: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from prefixwise.backends.torch.cuda import hopper_gemm
        from prefixwise.backends.torch.cuda.trunk import FusedGemms

        backend = TorchBackend(random_checkpoint(MODEL), dtype="bfloat16", device="cuda", quantization=quantization)
        assert backend._paged is not None
        fused = backend._paged._cuda_graphs._trunk.fused_gemms
        assert fused == FusedGemms(hopper_gemm.MIN_ROWS, adds=True)
        num_added = 0

        def residual_gemm(*arguments: Any) -> None:
            nonlocal num_added
            num_added += 1
            add(*arguments)

        add = hopper_gemm.residual_gemm
        monkeypatch.setattr(hopper_gemm, "residual_gemm", residual_gemm)
        prefix, items = np.arange(20, dtype=np.int32), [np.arange(n, n + 100, dtype=np.int32) for n in range(68)]
        together = backend.forward(sequences_batch(prefix, [[item] for item in items], Layout.CAUSAL))  # 8,192 rows
        assert num_added > 0
        num_added = 0
        alone = [backend.forward(sequences_batch(prefix, [[item]], Layout.CAUSAL)).label_logits for item in items]
        assert num_added == 0
        assert np.array_equal(together.label_logits, np.concatenate(alone))
        backend.close()


@pytest.mark.parametrize("row_unit", [128, 512])
@pytest.mark.parametrize("num_columns", [1024, 1536, 2048, 2560, 4096])
def test_the_trial_adds_whole_tiles_and_halves(num_columns: int, row_unit: int) -> None:
    from prefixwise.backends.torch.cuda.hopper_gemm import MIN_ROWS, _num_halved, rows_of_both_tiles

    num_rows = rows_of_both_tiles(num_columns, 132, row_unit)  # of an H200
    num_tiles = num_rows // 128 * (num_columns // 256)
    assert num_rows >= MIN_ROWS and num_rows % row_unit == 0
    assert 0 < _num_halved(num_tiles, 132) < num_tiles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epilogue", "dtype"),
    [(epilogue, dtype) for epilogue in ("silu", "gelu_tanh", "add") for dtype in ("bf16", "fp8e4nv")],
)
def test_it_fits_a_multiprocessor_and_its_registers(epilogue: str, dtype: str, tmp_path: Path) -> None:
    from triton import compile, knobs
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from prefixwise.backends.torch.cuda.hopper_gemm import OPTIONS, gemm_kernel

    def descriptor(dtype: str, box: list[int]) -> str:
        types = {"bf16": gl.bfloat16, "fp8e4nv": gl.float8e4nv}
        return f"tensordesc<{dtype}{box},{gl.NVMMASharedLayout.get_default_for(box, types[dtype])!r}>"

    is_fp8 = dtype == "fp8e4nv"
    step_size = 128 if is_fp8 else 64
    types = {
        "x": descriptor(dtype, [64, step_size]),
        "weight": descriptor(dtype, [128, step_size]),
        "out": descriptor("bf16" if epilogue == "add" else dtype, [64, 64 if epilogue == "add" else 32]),
    }
    scales = {**dict.fromkeys(("row_scales", "channel_scales"), "*fp32"), "exponents": "*u8"}
    absent = [name for name in scales if not is_fp8 or (name == "exponents" and epilogue == "add")]
    scales |= dict.fromkeys(absent, "constexpr")
    constants: dict[str, Any] = {"epilogue": epilogue, **dict.fromkeys(absent)}
    names = gemm_kernel.arg_names
    source = GluonASTSource(
        gemm_kernel,
        {name: {**types, **scales, "epilogue": "constexpr"}.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    assert compiled.metadata.shared <= 227 << 10  # bytes, of Hopper
    cubin = tmp_path / "gemm.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    # `compiled.asm["sass"]` ends at the first instruction that Triton's own reader does not know.
    sass = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-sass", cubin], check=True, capture_output=True, text=True
    ).stdout
    assert ("QGMMA" if is_fp8 else "HGMMA") in sass
    assert "STL" not in sass, "registers go to memory"


@pytest.mark.parametrize(("columns", "swizzle"), [(32, 32), (64, 64)])
def test_two_codes_at_a_time_lie_where_the_codes_of_a_part_do(columns: int, swizzle: int) -> None:
    """Shared memory of codes is written as numbers of 16 bits, and stored as codes."""
    from triton.experimental.gluon import language as gl

    of_codes = gl.NVMMASharedLayout.get_default_for([64, columns], gl.float8e4nv)
    of_pairs = gl.NVMMASharedLayout.get_default_for([64, columns // 2], gl.int16)
    assert of_codes.swizzle_byte_width == of_pairs.swizzle_byte_width == swizzle
    assert (of_codes.element_bitwidth, of_pairs.element_bitwidth) == (8, 16)
    assert of_codes.transposed == of_pairs.transposed and of_codes.fp4_padded == of_pairs.fp4_padded


class TestTrial:
    """What follows from the trial of the GEMM that activates."""

    @pytest.mark.parametrize(
        ("is_alike", "is_invariant", "expected"), [(True, True, 2048), (False, False, 2048), (False, True, 1)]
    )
    def test_the_number_of_rows_chooses_only_between_equal_bits(
        self, monkeypatch: pytest.MonkeyPatch, is_alike: bool, is_invariant: bool, expected: int
    ) -> None:
        from prefixwise.backends.torch.cuda import gemm_trials, hopper_gemm

        monkeypatch.setattr(gemm_trials, "gates_alike", lambda *_: is_alike)
        monkeypatch.setattr(hopper_gemm, "has_gated_gemm", lambda _: True)
        layer = SimpleNamespace(gate_up=torch.zeros(2, 2), fp8_scales=None)
        transformer: Any = SimpleNamespace(
            weights=SimpleNamespace(layers=[layer]),
            config=SimpleNamespace(activation="silu"),
            row_counts=None,
            tile_rows=2048 if is_invariant else None,
        )
        assert kernel_choice._choose_gate_rows(transformer) == expected

    def test_what_is_wrong_is_no_matter_of_bits(self) -> None:
        from prefixwise.backends.torch.cuda.gemm_trials import _check_near

        numbers = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        _check_near(numbers * (1 + 1e-3), numbers)
        for wrong in (numbers.flip(1), numbers * 1.1, numbers.clone().fill_(float("nan"))):
            with pytest.raises(ArithmeticError, match="off by"):
                _check_near(wrong, numbers)
