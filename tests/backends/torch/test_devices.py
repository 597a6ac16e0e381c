"""Which dtype a device gets where none is asked for."""

from __future__ import annotations

import logging

import pytest
import torch

from itemwise.backends.torch.devices import resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_units", [True, False])
def test_a_cpu_without_bfloat16_units_takes_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_units: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    with caplog.at_level(logging.INFO, "itemwise"):
        assert resolve_dtype("auto", CPU) == (torch.bfloat16 if has_units else torch.float32)
    said = ["this CPU has no units for bfloat16 (AMX or AVX512-BF16), so scoring is in float32"]
    assert caplog.messages == ([] if has_units else said)


def test_float32_is_there_for_whoever_asks() -> None:
    assert resolve_dtype("float32", CPU) == torch.float32
