"""Can the fast path run here? Imports Triton only where it is, and PyTorch's own way takes over where it does not
work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from prefixwise.backends.torch.elementwise import ElementwiseOps, PlainElementwiseOps
from prefixwise.backends.torch.model import Transformer
from prefixwise.forward.backend import BackendInfo
from prefixwise.models.config import ModelConfig

if TYPE_CHECKING:
    from prefixwise.backends.torch.cuda.attention import PagedAttention
    from prefixwise.backends.torch.cuda.runner import PagedRunner

log = logging.getLogger("prefixwise")

_MOST_HEADS_PER_KV = 16  # they are rows of one tile
_LEAST_CAPABILITY = (9, 0)  # Hopper


def choose_paged_runner(
    transformer: Transformer, elementwise_ops: ElementwiseOps, info: BackendInfo, *, is_coarse: bool
) -> PagedRunner | None:
    """For CUDA in half precision where Triton works (it made the row ops, too); else None."""
    device = transformer.weights.embedding.device
    if (
        isinstance(elementwise_ops, PlainElementwiseOps)
        or not has_paged_attention(transformer.config)
        or not is_new_enough(device)
    ):
        return None
    try:
        from prefixwise.backends.torch.cuda.runner import PagedRunner

        attention = _choose_attention(transformer.config, transformer.weights.embedding.dtype, device)
        # More than a step is only in a forward of one row that is longer than that; it has memory of its own then.
        pages, tokens = info.num_kv_blocks, info.step_tokens
        runner = PagedRunner(transformer, attention, num_pages=pages, max_tokens=tokens, is_coarse=is_coarse)
        runner.probe()
        return runner
    except Exception as error:  # a kernel that does not fit this device, too little memory: PyTorch may still do it
        log.warning("paged attention does not work here, so scoring is slower than it could be: %s", error)
        return None


def is_new_enough(device: torch.device) -> bool:
    """Older ones have no engine that copies tiles: compiled for them, the prefix kernel spills nearly all registers."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def has_paged_attention(config: ModelConfig) -> bool:
    """Rows of heads begin at multiples of 16 bytes, and a tile of them fits a multiprocessor."""
    is_size = config.head_size % 8 == 0 and 16 <= config.head_size <= 256
    return is_size and config.num_heads // config.num_kv_heads <= _MOST_HEADS_PER_KV


def _choose_attention(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PagedAttention:
    """The best that works: Gluon, in which one kernel is written, is not the same in all versions of Triton."""
    from prefixwise.backends.torch.cuda.attention import PagedAttention, prefix_tunings

    *better, last = prefix_tunings(config.head_size, device)
    for tuning in better:
        attention = PagedAttention.for_model(config, device, tuning)
        try:
            attention.probe(dtype)
            return attention
        except Exception as error:
            log.warning("a faster attention does not work here: %s", error)
    return PagedAttention.for_model(config, device, last)
