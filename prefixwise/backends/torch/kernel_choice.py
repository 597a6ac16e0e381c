"""Which kernels a device can run: fused elementwise ops, and the paged runner. Triton is imported only where it works.

Where a kernel does not work, PyTorch's own operations take over, and the log says so. A KV cache in FP8 and prefix
attention in FP8 need the paged runner, so there the same is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from prefixwise.backends.torch.elementwise import PLAIN, CpuElementwiseOps, ElementwiseOps, PlainElementwiseOps
from prefixwise.backends.torch.fp8 import KVFormat
from prefixwise.backends.torch.lora import LoraSlots
from prefixwise.backends.torch.model import Transformer
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import BackendInfo
from prefixwise.models.config import ModelConfig

if TYPE_CHECKING:
    from prefixwise.backends.torch.cuda.attention import PagedAttention
    from prefixwise.backends.torch.cuda.runner import PagedRunner
    from prefixwise.backends.torch.cuda.trunk import FusedGemms

log = logging.getLogger("prefixwise")

_MAX_HEADS_PER_KV = 16  # they are rows of one tile
_MIN_CAPABILITY = (9, 0)  # Hopper
_FP8_HEAD_MULTIPLE = 16  # bytes: where TMA lets a head begin
_MIN_FP8_PRODUCT = 32  # numbers that a matrix product in FP8 sums over, at least
_OPTIONS: Mapping[KVFormat, str] = {"fp8": "kv_cache_dtype", "fp8_keys": "prefix_attention_dtype"}


def kv_format_of(kv_cache_dtype: str, prefix_attention_dtype: str) -> KVFormat:
    """What the KV cache holds with these options. Raises BackendError where they exclude each other."""
    if kv_cache_dtype != "auto" and prefix_attention_dtype != "auto":
        raise BackendError(
            f"prefix_attention_dtype fp8 needs kv_cache_dtype auto, got {kv_cache_dtype}: that cache's keys have scales"
        )
    if prefix_attention_dtype != "auto":
        return "fp8_keys"
    return "auto" if kv_cache_dtype == "auto" else "fp8"


def check_kv_format(kv_format: KVFormat, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises BackendError where this model has no such KV cache on this device, before its weights are loaded."""
    if kv_format == "auto":
        return
    missing = None
    if device.type != "cuda":
        missing = f"a CUDA device, got {device.type}"
    elif dtype not in (torch.bfloat16, torch.float16):
        missing = f"dtype bfloat16 or float16, got {dtype}"
    elif config.head_size % _FP8_HEAD_MULTIPLE:
        missing = f"a head_dim that is a multiple of {_FP8_HEAD_MULTIPLE}, got {config.head_size}"
    elif kv_format == "fp8_keys" and config.head_size < _MIN_FP8_PRODUCT:
        missing = f"a head_dim of at least {_MIN_FP8_PRODUCT}, got {config.head_size}"
    elif not has_paged_attention(config):
        missing = "paged attention, which this model does not have: its attention or its norms are of another kind"
    elif not is_new_enough(device):
        found, least = (
            ".".join(map(str, each)) for each in (torch.cuda.get_device_capability(device), _MIN_CAPABILITY)
        )
        missing = f"compute capability {least} (Hopper) or newer, got {found}"
    if missing is not None:
        option = _OPTIONS[kv_format]
        raise BackendError(f"{option} fp8 needs {missing}; expected {option} auto")


def choose_elementwise_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ElementwiseOps:
    """Fused kernels for CUDA in half precision where Triton works, else plain operations."""
    if device.type == "cpu":
        return CpuElementwiseOps()
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return PLAIN
    try:
        from prefixwise.backends.torch.cuda.fused_elementwise import FusedElementwiseOps

        return FusedElementwiseOps.for_model(config, dtype, device)
    except Exception as error:  # no C compiler, no Python headers, an old device: PyTorch's operations still work
        log.warning("Triton does not work here, so scoring is slower than it could be: %s", error)
        return PLAIN


def choose_paged_runner(
    transformer: Transformer,
    elementwise_ops: ElementwiseOps,
    info: BackendInfo,
    *,
    is_coarse: bool,
    loras: LoraSlots | None = None,
    kv_format: KVFormat = "auto",
) -> PagedRunner | None:
    """For CUDA in half precision where Triton works (the elementwise ops are fused, too); else None.

    Raises BackendError with another `kv_format` than auto, where it would be None.
    """
    device = transformer.weights.embedding.device
    experts = transformer.weights.layers[0].experts
    if (
        isinstance(elementwise_ops, PlainElementwiseOps)
        or not has_paged_attention(transformer.config)
        or (experts is not None and not elementwise_ops.has_grouped_gemm(experts))
        or not is_new_enough(device)
    ):
        if kv_format != "auto":
            missing = "Triton" if isinstance(elementwise_ops, PlainElementwiseOps) else "grouped GEMMs of its experts"
            raise BackendError(f"{_OPTIONS[kv_format]} fp8 needs {missing}, and there is none here; expected auto")
        return None
    try:
        from prefixwise.backends.torch.cuda.runner import PagedRunner

        attention = _choose_attention(transformer, kv_format)
        # Only a forward of one long sequence has more tokens than a step; it allocates its own memory.
        pages, tokens = info.num_kv_blocks, info.step_tokens
        if loras is not None:
            from prefixwise.backends.torch.cuda.lora_kernels import add_lora

            loras.add_kernel = add_lora
        runner = PagedRunner(
            transformer,
            attention,
            num_pages=pages,
            max_tokens=tokens,
            is_coarse=is_coarse,
            loras=loras,
            kv_format=kv_format,
            fused_gemms=_choose_fused_gemms(transformer, has_loras=loras is not None),
        )
        runner.probe()
        return runner
    except Exception as error:  # a kernel that does not fit this device, too little memory: PyTorch may still run
        if kv_format != "auto":
            raise BackendError(
                f"{_OPTIONS[kv_format]} fp8 needs paged attention, which does not work here: {error}"
            ) from error
        log.warning("paged attention does not work here, so scoring is slower than it could be: %s", error)
        if loras is not None:
            loras.add_kernel = None
        return None


def is_new_enough(device: torch.device) -> bool:
    """Older GPUs have no TMA: compiled for them, the prefix kernel spills nearly all registers."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def has_paged_attention(config: ModelConfig) -> bool:
    """Do heads begin at multiples of 16 bytes, does a tile of them fit a multiprocessor, and has the model no part that
    the paged runner lacks? It has causal attention, norms before each part, and QK norms of single heads."""
    is_size = config.head_size % 8 == 0 and 16 <= config.head_size <= 256
    if not config.is_causal or not config.pre_norms or config.whole_qk_norm:
        return False
    return is_size and config.num_heads // config.num_kv_heads <= _MAX_HEADS_PER_KV


def _choose_attention(transformer: Transformer, kv_format: KVFormat) -> PagedAttention:
    """The fastest that works: one kernel is written in Gluon, which differs between versions of Triton."""
    from prefixwise.backends.torch.cuda.attention import PagedAttention, prefix_tunings

    config, embedding = transformer.config, transformer.weights.embedding
    device, is_fp8 = embedding.device, transformer.weights.layers[0].fp8_scales is not None
    *faster, last = prefix_tunings(config.head_size, device)
    if not config.has_plain_attention:
        faster = []  # the kernel in Gluon has no windows and no capped scores
    for tuning in faster:
        attention = PagedAttention.for_model(config, device, tuning)
        try:
            attention.probe(embedding.dtype, has_fp8_queries=kv_format == "fp8_keys", has_fp8_result=is_fp8)
            return attention
        except Exception as error:
            log.warning("a faster attention does not work here: %s", error)
    return PagedAttention.for_model(config, device, last)


def _choose_fused_gemms(transformer: Transformer, *, has_loras: bool) -> FusedGemms:
    """Those that work here: they are written in Gluon, which differs between versions of Triton."""
    from prefixwise.backends.torch.cuda.trunk import FusedGemms

    device = transformer.weights.embedding.device
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == _MIN_CAPABILITY
    if has_loras or not is_hopper:  # adapters' matrices have more columns, and what they add is added last
        return FusedGemms()
    gate_rows, adds = None, False
    try:
        gate_rows = _choose_gate_rows(transformer)
    except Exception as error:
        log.warning("a faster GEMM with its activation does not work here: %s", error)
    try:
        adds = _choose_adds(transformer)
    except Exception as error:
        log.warning("a faster GEMM that adds the residual does not work here: %s", error)
    torch.cuda.empty_cache()  # what the trials took
    return FusedGemms(gate_rows, adds)


def _choose_gate_rows(transformer: Transformer) -> int | None:
    """From how many rows on one kernel takes the place of the MLP's first GEMM and its activation; None: never.

    Both ways were seen to give the same bits. Where they do not, and the number of rows must not decide a row's bits,
    the one kernel serves all numbers.
    """
    from prefixwise.backends.torch.cuda.gemm_trials import gates_alike
    from prefixwise.backends.torch.cuda.hopper_gemm import MIN_ROWS, has_gated_gemm

    layer = transformer.weights.layers[0]
    if layer.gate_up is None or not has_gated_gemm(layer.gate_up):
        return None
    scales = None if layer.fp8_scales is None else layer.fp8_scales.gate_up
    has_same_bits = gates_alike(layer.gate_up, scales, transformer.config.activation)
    is_invariant = transformer.row_counts is not None or transformer.tile_rows is not None
    return MIN_ROWS if has_same_bits or not is_invariant else 1


def _choose_adds(transformer: Transformer) -> bool:
    """Do the GEMMs of O and down add to the residual, where nothing comes between? Only with the same bits: for few
    rows they are slow."""
    from prefixwise.backends.torch.cuda.gemm_trials import adds_alike
    from prefixwise.backends.torch.cuda.hopper_gemm import has_residual_gemm
    from prefixwise.backends.torch.cuda.runner import TOKEN_MULTIPLE

    layer = transformer.weights.layers[0]
    if layer.post_attention_norm is not None or layer.post_mlp_norm is not None:
        return False
    if transformer.config.residual_scale != 1.0:
        return False
    of_o, of_down = (None, None) if layer.fp8_scales is None else (layer.fp8_scales.o, layer.fp8_scales.down)
    matrices = [(layer.o, of_o)] + ([] if layer.down is None else [(layer.down, of_down)])
    unit = transformer.tile_rows or TOKEN_MULTIPLE
    if transformer.row_counts is not None:
        unit = transformer.row_counts.unit
    if not all(has_residual_gemm(matrix) for matrix, _ in matrices):
        return False
    has_same_bits = all(adds_alike(matrix, scales, unit) for matrix, scales in matrices)
    if not has_same_bits:
        log.info("a faster GEMM that adds the residual gives other bits here, so it is not used")
    return has_same_bits
