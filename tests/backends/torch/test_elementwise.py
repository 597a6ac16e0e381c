from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.torch.elementwise import PLAIN, CpuElementwiseOps, choose_elementwise_ops
from prefixwise.backends.torch.softmax import merge


class TestPlainMerge:
    def test_tokens_find_their_part_and_the_others_stay(self) -> None:
        torch.manual_seed(0)
        own, part = (torch.randn(5, 3, 8), torch.randn(3, 5)), (torch.randn(2, 3, 8), torch.randn(3, 2))
        merged = PLAIN.merge(own, part, torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32), 7)
        for token, row in ((1, 1), (3, 0)):
            expected, _ = merge((own[0][token], own[1][:, token]), (part[0][row], part[1][:, row]))
            assert torch.equal(merged[token], expected)
        assert torch.equal(merged[[0, 2, 4]], own[0][[0, 2, 4]])
        assert not merged[5:].any(), "padding is zero"

    def test_the_result_has_the_dtype_of_the_parts(self) -> None:
        part = torch.ones(1, 2, 4, dtype=torch.float16), torch.zeros(2, 1)
        merged = PLAIN.merge(part, part, torch.zeros(1, dtype=torch.int32), 1)
        assert merged.dtype == torch.float16
        assert torch.equal(merged, part[0])


class TestChoice:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_cpu_takes_its_own(self, dtype: torch.dtype) -> None:
        assert isinstance(choose_elementwise_ops(QWEN3_06B, dtype, torch.device("cpu")), CpuElementwiseOps)

    @pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
    def test_where_triton_does_not_work_plain_operations_serve_and_the_log_says_so(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from prefixwise.backends.torch.fused_elementwise import FusedElementwiseOps

        def fail(*_: object) -> None:
            raise RuntimeError("no C compiler")

        monkeypatch.setattr(FusedElementwiseOps, "for_model", fail)
        with caplog.at_level(logging.WARNING, "prefixwise"):
            assert choose_elementwise_ops(QWEN3_06B, torch.bfloat16, torch.device("cuda")) is PLAIN
        assert caplog.messages == ["Triton does not work here, so scoring is slower than it could be: no C compiler"]

    def test_where_triton_is_missing_plain_operations_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("prefixwise.backends.torch.elementwise.find_spec", lambda _: None)
        assert choose_elementwise_ops(QWEN3_06B, torch.bfloat16, torch.device("cuda")) is PLAIN


class TestHeadsOnACpu:
    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
    @pytest.mark.parametrize("has_norm", [True, False])
    def test_they_are_those_of_plain_operations(self, dtype: torch.dtype, bound: float, has_norm: bool) -> None:
        random = torch.Generator().manual_seed(1)
        qkv = torch.randn(7, 8, 64, generator=random).to(dtype)
        weight = 1 + 0.1 * torch.randn(6, 64, generator=random).to(dtype) if has_norm else None
        angles = torch.randn(7, 1, 32, generator=random)
        arguments = (6, weight, 1e-6, angles.cos(), angles.sin())
        expected = PLAIN.qk_norm_rope(qkv.clone(), *arguments)
        found = CpuElementwiseOps().qk_norm_rope(qkv.clone(), *arguments)
        assert torch.equal(found[:, 6:], qkv[:, 6:]), "values stay as they are"
        assert (found.float() - expected.float()).abs().max() <= bound * expected.float().abs().max()

    def test_a_row_has_its_bits_wherever_it_is(self) -> None:
        random = torch.Generator().manual_seed(2)
        qkv, weight = torch.randn(128, 8, 64, generator=random).bfloat16(), torch.ones(6, 64)
        angles = torch.randn(128, 1, 32, generator=random)

        def turned(order: torch.Tensor) -> torch.Tensor:
            return CpuElementwiseOps().qk_norm_rope(
                qkv[order], 6, weight, 1e-6, angles[order].cos(), angles[order].sin()
            )

        order = torch.randperm(128, generator=random)
        assert torch.equal(turned(order), turned(torch.arange(128))[order])
