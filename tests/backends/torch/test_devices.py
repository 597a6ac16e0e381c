"""Which dtypes a device gets: for the weights where none is asked for, and for the arithmetic."""

from __future__ import annotations

import logging

import pytest
import torch

from prefixwise.backends.torch.devices import (
    DTYPES,
    gemms_take_all_cores,
    native_cpu_dtypes,
    resolve_compute_dtype,
    resolve_device,
    resolve_dtype,
)
from prefixwise.contract.errors import BackendError

CPU = torch.device("cpu")
X86, ARM = "x86_64", "aarch64"


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str, *, bfloat16: bool, float16: bool = False) -> None:
    """A processor of this kind, with units for these dtypes. oneDNN on x86 calls emulated bfloat16 supported."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16 and machine == X86)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bfloat16 or machine == X86)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: float16)


@pytest.mark.parametrize("machine", [X86, ARM])
@pytest.mark.parametrize("has_units", [True, False])
def test_a_cpu_without_bfloat16_units_takes_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str, has_units: bool
) -> None:
    pretend(monkeypatch, machine, bfloat16=has_units)
    with caplog.at_level(logging.INFO, "prefixwise"):
        assert resolve_dtype("auto", CPU) == (torch.bfloat16 if has_units else torch.float32)
    said = ["dtype float32: this CPU has no units for bfloat16 (AMX, AVX512-BF16 or ARM's BF16)"]
    assert caplog.messages == ([] if has_units else said)


@pytest.mark.parametrize("name", DTYPES)
def test_the_dtype_that_is_asked_for_is_that_of_the_weights(name: str) -> None:
    assert resolve_dtype(name, CPU) == DTYPES[name]


@pytest.mark.parametrize("machine", [X86, ARM])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_cpu_would_emulate_is_computed_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str, dtype: torch.dtype
) -> None:
    pretend(monkeypatch, machine, bfloat16=False)
    with caplog.at_level(logging.INFO, "prefixwise"):
        assert resolve_compute_dtype(dtype, CPU) == torch.float32
    name = str(dtype).removeprefix("torch.")
    assert caplog.messages == [
        f"this CPU has no units for {name}: the weights stay in {name} and the arithmetic is in float32"
    ]


def test_what_has_units_is_computed_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend(monkeypatch, X86, bfloat16=True, float16=True)
    with caplog.at_level(logging.INFO, "prefixwise"):
        assert [resolve_compute_dtype(dtype, CPU) for dtype in DTYPES.values()] == list(DTYPES.values())
        assert resolve_compute_dtype(torch.float16, torch.device("cuda")) == torch.float16
    assert caplog.messages == []


def test_half_precision_units_of_arm_are_not_used_for_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their GEMMs add in half precision, and not in float32."""
    pretend(monkeypatch, ARM, bfloat16=True, float16=True)
    assert native_cpu_dtypes() == {torch.float32, torch.bfloat16}


def test_a_pytorch_without_onednn_has_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ARM, bfloat16=True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert native_cpu_dtypes() == {torch.float32}


def test_gemms_take_all_cores_where_the_arm_compute_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_acl_supported", lambda: True)
    for machine in (X86, ARM):
        pretend(monkeypatch, machine, bfloat16=False)
        assert gemms_take_all_cores() == (machine == ARM)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not gemms_take_all_cores()


def test_the_gpu_of_a_mac_is_refused_with_a_reason() -> None:
    with pytest.raises(BackendError, match=r"'mps' is not supported: .* same alone and beside others; expected cpu"):
        resolve_device("mps")
