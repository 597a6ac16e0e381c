"""The MLP's first GEMM with its activation in one kernel: on a Hopper GPU, and compiled for one where there is none."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.torch.backend import TorchBackend
from prefixwise.forward.batch import Layout
from prefixwise.models.config import Activation
from tests.backends.torch.batches import sequences_batch

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MODEL = replace(
    QWEN3_06B, vocab_size=600, model_size=512, mlp_size=384, num_layers=2, num_heads=4, num_kv_heads=2, head_size=64,
    max_context_len=4096,
)  # fmt: skip

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="not a Hopper GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    @pytest.mark.parametrize(("size", "inner"), [(3072, 1024), (384, 512), (9728, 2560)])
    def test_it_is_cublas_and_the_activation(
        self, size: int, inner: int, activation: Activation, dtype: torch.dtype
    ) -> None:
        """To the bit here, where a sum has no rounding, and of every number of rows."""
        from prefixwise.backends.torch.cuda.fused_elementwise import gate
        from prefixwise.backends.torch.cuda.gated_gemm import gated_gemm

        x = torch.randint(-2, 3, (2304, inner), device="cuda").to(dtype)
        weight = torch.randint(-2, 3, (2 * size, inner), device="cuda").to(dtype) / 64
        for num_rows in (256, 2048, 2304):
            found, expected = x.new_full((num_rows, size + 8), float("nan")), x.new_empty(num_rows, size)
            gated_gemm(x[:num_rows], weight, activation, found)
            gate(F.linear(x[:num_rows], weight), activation, expected)
            assert torch.equal(found[:, :size], expected)
            assert found[:, size:].isnan().all(), "columns behind it are another's"

    def test_a_row_has_the_same_bits_in_any_company(self) -> None:
        from prefixwise.backends.torch.cuda.gated_gemm import gated_gemm

        x = torch.randn(4096, 1024, device="cuda").bfloat16()
        weight = (0.02 * torch.randn(6144, 1024, device="cuda")).bfloat16()
        whole = torch.empty(4096, 3072, dtype=torch.bfloat16, device="cuda")
        gated_gemm(x, weight, "silu", whole)
        order = torch.randperm(4096, device="cuda")[:512]
        some = torch.empty(512, 3072, dtype=torch.bfloat16, device="cuda")
        gated_gemm(x[order].contiguous(), weight, "silu", some)
        assert torch.equal(some, whole[order])

    def test_a_model_uses_it_for_many_rows_and_has_the_bits_of_few(self) -> None:
        backend = TorchBackend(random_checkpoint(MODEL), dtype="bfloat16", device="cuda")
        assert backend._paged is not None
        assert backend._paged._cuda_graphs._trunk.gate_rows is not None
        prefix, items = np.arange(20, dtype=np.int32), [np.arange(n, n + 100, dtype=np.int32) for n in range(30)]
        together = backend.forward(sequences_batch(prefix, [[item] for item in items], Layout.CAUSAL))
        alone = [backend.forward(sequences_batch(prefix, [[item]], Layout.CAUSAL)).label_logits for item in items]
        assert np.array_equal(together.label_logits, np.concatenate(alone))
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_silu", [True, False])
def test_it_fits_a_multiprocessor_and_its_registers(is_silu: bool) -> None:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from prefixwise.backends.torch.cuda.gated_gemm import TUNING, gated_gemm_kernel, kernel_sizes

    def descriptor(box: list[int]) -> str:
        return f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"

    sizes: dict[str, Any] = {**kernel_sizes(TUNING), "is_silu": is_silu}
    options = {name: sizes.pop(name) for name in ("num_warps", "maxnreg")}
    types = {
        "x": descriptor([TUNING.group_rows, TUNING.step_size]),
        "weight": descriptor([TUNING.num_columns, TUNING.step_size]),
        "out": descriptor([TUNING.group_rows, TUNING.num_columns // TUNING.num_parts]),
    }
    names = gated_gemm_kernel.arg_names
    source = GluonASTSource(
        gated_gemm_kernel,
        {name: "constexpr" if name in sizes else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in sizes.items()},
    )
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 << 10  # bytes, of Hopper
    assert "HGMMA" in compiled.asm["sass"]
    assert "STL" not in compiled.asm["sass"], "registers go to memory"
