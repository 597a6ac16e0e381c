from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch

from benchmarks.random_checkpoint import QWEN3_06B
from itemwise.backends.torch.row_ops import PLAIN, choose_row_ops
from itemwise.backends.torch.softmax import merge


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
    def test_a_cpu_takes_plain_operations(self, dtype: torch.dtype) -> None:
        assert choose_row_ops(QWEN3_06B, dtype, torch.device("cpu")) is PLAIN

    @pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
    def test_where_triton_does_not_work_plain_operations_serve_and_the_log_says_so(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from itemwise.backends.torch.fused import FusedRowOps

        def fail(*_: object) -> None:
            raise RuntimeError("no C compiler")

        monkeypatch.setattr(FusedRowOps, "for_model", fail)
        with caplog.at_level(logging.WARNING, "itemwise"):
            assert choose_row_ops(QWEN3_06B, torch.bfloat16, torch.device("cuda")) is PLAIN
        assert caplog.messages == ["Triton does not work here, so scoring is slower than it could be: no C compiler"]

    def test_where_triton_is_missing_plain_operations_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("itemwise.backends.torch.row_ops.find_spec", lambda _: None)
        assert choose_row_ops(QWEN3_06B, torch.bfloat16, torch.device("cuda")) is PLAIN
