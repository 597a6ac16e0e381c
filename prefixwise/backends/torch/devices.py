"""Which device, which dtype for the weights and for the arithmetic, how much memory for the KV cache, and transfers."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixwise.backends.torch.fp8 import KV_SCALE_BYTES, KVFormat
from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.host import is_arm
from prefixwise.models.config import ModelConfig

log = logging.getLogger("prefixwise")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CPU_CACHE_BYTES = 1 << 30
_MAX_CACHED_TOKENS = 1 << 20  # by default: a small model need not fill a GPU with its KV cache
_CUDA_CACHE_SHARE = 0.2  # of the device's memory
_CUDA_FREE_SHARE = 0.5  # of the memory that the weights leave free, where that is less


def resolve_device(device: str) -> torch.device:
    """`auto`: CUDA where there is a CUDA device. Raises BackendError where the device does not exist."""
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


def has_cuda() -> bool:
    """Does PyTorch see a CUDA device?"""
    return torch.cuda.is_available()


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of the weights. `auto`: bfloat16 where the device has units for it, else float32, which is logged."""
    if dtype == "auto":
        if device.type == "cuda" or torch.bfloat16 in native_cpu_dtypes():
            return torch.bfloat16
        log.info("dtype float32: this CPU has no units for bfloat16 (AMX, AVX512-BF16 or ARM's BF16)")
        return torch.float32
    if dtype not in DTYPES:
        raise BackendError(f"unknown dtype {dtype!r}; expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations, GEMMs and KV cache: that of the weights, or float32 on a CPU that would emulate it."""
    if device.type != "cpu" or dtype in native_cpu_dtypes():
        return dtype
    name = dtype_name(dtype)
    log.info("this CPU has no units for %s: the weights stay in %s and the arithmetic is in float32", name, name)
    return torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """The name that options use."""
    return str(dtype).removeprefix("torch.")


def has_onednn() -> bool:
    """Does this PyTorch have oneDNN? On macOS it has not."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@cache
def has_openblas() -> bool:
    """Does this PyTorch multiply with OpenBLAS where oneDNN does not? Unlike MKL's, its results do not depend on where
    the operands lie in memory."""
    return "BLAS_INFO=open" in torch.__config__.show()


def gemms_take_all_cores() -> bool:
    """Does oneDNN multiply with the Arm Compute Library, as on ARM?

    That runs a GEMM on as many cores as the process had when PyTorch was imported, whatever the calling thread's number
    of threads is, and GEMMs of one shape one after the other.
    """
    return has_onednn() and is_arm() and bool(torch.ops.mkldnn._is_mkldnn_acl_supported())


def native_cpu_dtypes() -> frozenset[torch.dtype]:
    """The dtypes that this CPU multiplies at full rate, with sums in float32.

    ARM's half-precision units (`asimdhp`) do not count for float16: their GEMMs add in half precision, too.
    """
    native = {torch.float32}
    if not has_onednn():
        return frozenset(native)
    # oneDNN's own answer counts emulation on AVX-512 as support.
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() if is_arm() else torch.cpu._is_avx512_bf16_supported():
        native.add(torch.bfloat16)
    if not is_arm() and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        native.add(torch.float16)
    return frozenset(native)


def device_title(device: torch.device) -> str:
    """For the log and the report: the GPU's name, or the number of threads of a CPU."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def kv_block_bytes(config: ModelConfig, dtype: torch.dtype, kv_format: KVFormat = "auto") -> int:
    """Keys and values of KV_BLOCK_SIZE tokens in every layer; in FP8 with their scales."""
    wide, narrow = config.head_size * dtype.itemsize, config.head_size + KV_SCALE_BYTES
    head_bytes = {"auto": 2 * wide, "fp8": 2 * narrow, "fp8_keys": config.head_size + wide}[kv_format]
    return config.num_layers * KV_BLOCK_SIZE * config.num_kv_heads * head_bytes


def count_kv_blocks(block_bytes: int, device: torch.device, num_bytes: int | None) -> int:
    """How many KV blocks fit: in the given bytes, by default in a share of the device's memory."""
    if num_bytes is None:
        num_blocks = _default_cache_bytes(device) // block_bytes
        if device.type != "cpu":  # a CPU allocates blocks as needed
            num_blocks = min(num_blocks, _MAX_CACHED_TOKENS // KV_BLOCK_SIZE)
        return max(1, num_blocks)
    if num_bytes < block_bytes:
        raise BackendError(
            f"prefix_cache_bytes must be at least {block_bytes} (one block of {KV_BLOCK_SIZE} tokens), got {num_bytes}"
        )
    return num_bytes // block_bytes


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return int(min(_CUDA_CACHE_SHARE * total, _CUDA_FREE_SHARE * free))


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device; on a CPU the tensor shares its memory.

    A plain copy to a GPU waits for all work that was queued before it. A copy from pinned memory is queued too, so the
    host prepares a forward while the one before it runs.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def token_index(tokens: Int64Array, device: torch.device) -> Tensor | slice:
    """An index of these tokens: a slice where they are consecutive, so that indexing copies nothing."""
    if np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens))):
        return slice(int(tokens[0]), int(tokens[0]) + len(tokens))
    return upload(tokens, device)


def take(rows: Tensor, index: Tensor | slice) -> Tensor:
    """The rows of a `token_index`: a view of consecutive ones, else a copy, in a third of the time that `[]` takes."""
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


class Download:
    """A tensor on its way to the host: the copy is queued after the work that computes the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> NDArray[np.float32]:
        """The array, in ordinary memory. Raises an error of the work that the device did before it."""
        if self._copied is None:
            return self._tensor.numpy()
        self._copied.synchronize()
        return self._tensor.numpy().copy()
