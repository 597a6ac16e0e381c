from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.torch.elementwise import PLAIN, CpuElementwiseOps
from prefixwise.backends.torch.kernel_choice import choose_elementwise_ops, has_paged_attention
from prefixwise.backends.torch.model import Transformer
from prefixwise.backends.torch.weights import load_weights
from prefixwise.backends.torch.workers import Workers


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"windows": (64,) * 28}, True),
        ({"score_softcap": 50.0, "score_scale": 0.1, "post_norms": True}, True),
        ({"pre_norms": False}, False),
        ({"is_causal": False}, False),
        ({"whole_qk_norm": True}, False),
        ({"head_size": 20}, False),
        ({"num_heads": 64, "num_kv_heads": 2}, False),
    ],
)
def test_the_paged_runner_takes_models_whose_parts_it_has(changes: dict[str, Any], expected: bool) -> None:
    assert has_paged_attention(replace(QWEN3_06B, **changes)) is expected


def test_hoppers_kernel_is_left_out_where_scores_are_not_plain_or_it_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no windows and no capped scores; the kernel for all GPUs has."""
    pytest.importorskip("triton")
    from prefixwise.backends.torch import kernel_choice
    from prefixwise.backends.torch.cuda import attention

    tunings = [attention.HOPPER_TUNING, attention.PrefixTuning()]
    monkeypatch.setattr(attention, "prefix_tunings", lambda *_: tunings)
    probed: list[Any] = []
    monkeypatch.setattr(attention.PagedAttention, "probe", lambda *_, **kinds: probed.append(kinds))
    small = replace(QWEN3_06B, num_layers=1, vocab_size=64)
    for config, expected in ((small, tunings[0]), (replace(small, windows=(64,)), tunings[1])):
        weights = load_weights(random_checkpoint(config), torch.bfloat16, torch.device("cpu"), is_fp8=True)
        transformer = Transformer(config, weights, None, Workers(None))
        assert kernel_choice._choose_attention(transformer, "fp8_keys")._prefix is expected
    assert probed == [{"has_fp8_queries": True, "has_fp8_result": True}]

    def fail(*_: Any, **kinds: bool) -> None:
        if kinds["has_fp8_result"]:
            raise RuntimeError("no such conversion")

    monkeypatch.setattr(attention.PagedAttention, "probe", fail)
    transformer = Transformer(small, weights, None, Workers(None))
    assert kernel_choice._choose_attention(transformer, "auto")._prefix is tunings[1]
    assert "a faster attention does not work here: no such conversion" in caplog.text
