from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.torch.elementwise import PLAIN, CpuElementwiseOps
from prefixwise.backends.torch.kernel_choice import choose_elementwise_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_takes_its_own(dtype: torch.dtype) -> None:
    assert isinstance(choose_elementwise_ops(QWEN3_06B, dtype, torch.device("cpu")), CpuElementwiseOps)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_where_triton_does_not_work_plain_operations_serve_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from prefixwise.backends.torch.cuda.fused_elementwise import FusedElementwiseOps

    def fail(*_: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(FusedElementwiseOps, "for_model", fail)
    with caplog.at_level(logging.WARNING, "prefixwise"):
        assert choose_elementwise_ops(QWEN3_06B, torch.bfloat16, torch.device("cuda")) is PLAIN
    assert caplog.messages == ["Triton does not work here, so scoring is slower than it could be: no C compiler"]


def test_where_triton_is_missing_plain_operations_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixwise.backends.torch.kernel_choice.find_spec", lambda _: None)
    assert choose_elementwise_ops(QWEN3_06B, torch.bfloat16, torch.device("cuda")) is PLAIN
