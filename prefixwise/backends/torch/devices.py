"""Which device, which dtype for the weights and for the arithmetic, and how much memory is for the KV cache."""

from __future__ import annotations

import logging
import platform

import torch

from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.models.config import ModelConfig

log = logging.getLogger("prefixwise")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CPU_PREFIX_BYTES = 1 << 30
_MAX_PREFIX_TOKENS = 1 << 20  # by default: a small model need not fill a GPU with them
_CUDA_PREFIX_SHARE = 0.2  # of the device's memory
_CUDA_FREE_SHARE = 0.5  # of what is free beside the weights, where that is less


def resolve_device(device: str) -> torch.device:
    """`auto`: CUDA where there is any. Raises BackendError where the device is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device.replace("gpu", "cuda", 1))
    except (RuntimeError, TypeError, AttributeError):
        raise BackendError(f"unknown device {device!r}; expected auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device {device!r} was asked for, but PyTorch {torch.__version__} sees no CUDA device")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise BackendError(f"device {device!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    if resolved.type == "mps":
        raise BackendError(
            f"device {device!r} is not supported: on Apple's GPU an item's bits have not been shown to be the same "
            "alone and beside others; expected cpu, which runs on every Mac"
        )
    if resolved.type not in ("cpu", "cuda"):
        raise BackendError(f"device {device!r} is not supported by the torch backend; expected cpu or cuda")
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Of the weights. `auto`: bfloat16 where the device has units for it, else float32, and the log says so."""
    if dtype == "auto":
        if device.type == "cuda" or torch.bfloat16 in native_cpu_dtypes():
            return torch.bfloat16
        log.info("dtype float32: this CPU has no units for bfloat16 (AMX, AVX512-BF16 or ARM's BF16)")
        return torch.float32
    if dtype not in DTYPES:
        raise BackendError(f"unknown dtype {dtype!r}; expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of activations, GEMMs and the KV cache: that of the weights, or float32 on a CPU that would emulate it."""
    if device.type != "cpu" or dtype in native_cpu_dtypes():
        return dtype
    name = dtype_name(dtype)
    log.info("this CPU has no units for %s: the weights are kept in %s and the arithmetic is in float32", name, name)
    return torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As options write it."""
    return str(dtype).removeprefix("torch.")


def has_onednn() -> bool:
    """Not on macOS."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def native_cpu_dtypes() -> frozenset[torch.dtype]:
    """The dtypes that this CPU multiplies at full rate, with sums in float32.

    ARM's half-precision units (`asimdhp`) do not count for float16: what they give has not been measured, and oneDNN
    does not use them on a Neoverse-N1.
    """
    native = {torch.float32}
    if not has_onednn():
        return frozenset(native)
    is_arm = platform.machine() in ("aarch64", "arm64")
    # oneDNN's own answer counts emulation on AVX-512 as support.
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() if is_arm else torch.cpu._is_avx512_bf16_supported():
        native.add(torch.bfloat16)
    if not is_arm and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        native.add(torch.float16)
    return frozenset(native)


def device_title(device: torch.device) -> str:
    """For the log and the report: the GPU's name, or the number of threads of a CPU."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def kv_block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of KV_BLOCK_SIZE tokens in every layer."""
    return 2 * config.num_layers * KV_BLOCK_SIZE * config.num_kv_heads * config.head_size * dtype.itemsize


def count_prefix_blocks(block_bytes: int, device: torch.device, num_bytes: int | None) -> int:
    """How many blocks may be kept: what the bytes allow, by default a share of the device's memory."""
    if num_bytes is None:
        num_blocks = _default_prefix_bytes(device) // block_bytes
        most = num_blocks if device.type == "cpu" else _MAX_PREFIX_TOKENS // KV_BLOCK_SIZE  # a CPU's are made as needed
        return max(1, min(num_blocks, most))
    if num_bytes < block_bytes:
        raise BackendError(
            f"prefix_cache_bytes must be at least {block_bytes} (one block of {KV_BLOCK_SIZE} tokens), got {num_bytes}"
        )
    return num_bytes // block_bytes


def _default_prefix_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_PREFIX_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return int(min(_CUDA_PREFIX_SHARE * total, _CUDA_FREE_SHARE * free))
