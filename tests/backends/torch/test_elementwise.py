from __future__ import annotations

import pytest
import torch

from prefixwise.backends.torch.elementwise import PLAIN, CpuElementwiseOps
from prefixwise.backends.torch.softmax import merge


class TestPlainMerge:
    def test_tokens_with_a_prefix_are_merged_and_the_rest_are_not_changed(self) -> None:
        torch.manual_seed(0)
        self_part, prefix_part = (torch.randn(5, 3, 8), torch.randn(3, 5)), (torch.randn(2, 3, 8), torch.randn(3, 2))
        merged = PLAIN.merge(self_part, prefix_part, torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32), 7)
        for token, row in ((1, 1), (3, 0)):
            expected, _ = merge(
                (self_part[0][token], self_part[1][:, token]), (prefix_part[0][row], prefix_part[1][:, row])
            )
            assert torch.equal(merged[token], expected)
        assert torch.equal(merged[[0, 2, 4]], self_part[0][[0, 2, 4]])
        assert not merged[5:].any(), "padding is zero"

    def test_the_result_has_the_dtype_of_the_parts(self) -> None:
        prefix_part = torch.ones(1, 2, 4, dtype=torch.float16), torch.zeros(2, 1)
        merged = PLAIN.merge(prefix_part, prefix_part, torch.zeros(1, dtype=torch.int32), 1)
        assert merged.dtype == torch.float16
        assert torch.equal(merged, prefix_part[0])


class TestHeadsOnACpu:
    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
    @pytest.mark.parametrize("has_norm", [True, False])
    def test_qk_norm_and_rope_are_those_of_plain_operations(
        self, dtype: torch.dtype, bound: float, has_norm: bool
    ) -> None:
        random = torch.Generator().manual_seed(1)
        qkv = torch.randn(7, 8, 64, generator=random).to(dtype)
        weight = 1 + 0.1 * torch.randn(6, 64, generator=random).to(dtype) if has_norm else None
        angles = torch.randn(7, 1, 32, generator=random)
        arguments = (6, weight, 1e-6, angles.cos(), angles.sin())
        expected = PLAIN.qk_norm_rope(qkv.clone(), *arguments)
        found = CpuElementwiseOps().qk_norm_rope(qkv.clone(), *arguments)
        assert torch.equal(found[:, 6:], qkv[:, 6:]), "values are not changed"
        assert (found.float() - expected.float()).abs().max() <= bound * expected.float().abs().max()

    def test_a_row_has_the_same_bits_at_every_index(self) -> None:
        random = torch.Generator().manual_seed(2)
        qkv, weight = torch.randn(128, 8, 64, generator=random).bfloat16(), torch.ones(6, 64)
        angles = torch.randn(128, 1, 32, generator=random)

        def with_rope(order: torch.Tensor) -> torch.Tensor:
            return CpuElementwiseOps().qk_norm_rope(
                qkv[order], 6, weight, 1e-6, angles[order].cos(), angles[order].sin()
            )

        order = torch.randperm(128, generator=random)
        assert torch.equal(with_rope(order), with_rope(torch.arange(128))[order])
