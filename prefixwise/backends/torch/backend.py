"""`TorchBackend`: a checkpoint on a CPU or a CUDA device, ready to run forwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixwise.backends.torch.attention import Attention, QueryCut, TiledAttention
from prefixwise.backends.torch.devices import (
    Download,
    count_kv_blocks,
    device_title,
    dtype_name,
    gemms_take_all_cores,
    has_openblas,
    kv_block_bytes,
    resolve_compute_dtype,
    resolve_device,
    resolve_dtype,
    token_index,
    upload,
)
from prefixwise.backends.torch.few_tiles import few_tiles
from prefixwise.backends.torch.fp8 import KVFormat, check_fp8
from prefixwise.backends.torch.heads import Heads
from prefixwise.backends.torch.invariant_rows import choose_rows, keeps_bits
from prefixwise.backends.torch.kernel_choice import (
    check_kv_format,
    choose_elementwise_ops,
    choose_paged_runner,
    kv_format_of,
)
from prefixwise.backends.torch.kv_blocks import gather_blocks, split_blocks, tokens_to_cache
from prefixwise.backends.torch.linear import pack_weights
from prefixwise.backends.torch.lora import LoraRows, LoraSlots, can_widen, widened
from prefixwise.backends.torch.model import Transformer, embedding_rows
from prefixwise.backends.torch.pooling import mean_of_segments
from prefixwise.backends.torch.softmax import ScoreRule
from prefixwise.backends.torch.varlen import VarlenAttention
from prefixwise.backends.torch.weights import load_weights
from prefixwise.backends.torch.workers import Workers
from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.backend import (
    DEFAULT_TOKEN_BUDGETS,
    LEAST_STEP_TOKENS,
    STEP_SECONDS,
    Backend,
    BackendInfo,
    DeviceKind,
    Program,
)
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, KVBlock, Layout, RunningForward
from prefixwise.forward.pooling import read_tokens
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.config import ModelConfig
from prefixwise.models.lora import LoraAdapter, Matrix
from prefixwise.models.weight_cache import with_bfloat16_weights

if TYPE_CHECKING:
    from prefixwise.backends.torch.cuda.runner import PagedRunner

log = logging.getLogger("prefixwise")

CPU_TILE_ROWS = 128
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")  # of the host; the second is mimalloc, on ARM
CUDA_TOKEN_MULTIPLE = 256  # fewer rows take a GPU hardly less time
CUDA_STEP_TOKENS = 16_384
CPU_MIN_STEP_TOKENS, CPU_STEP_TOKENS_PER_THREAD = 2048, 256
CPU_MAX_WHOLE_ITEM, CUDA_MAX_WHOLE_ITEM = 256, 1024  # tokens

Integer = TypeVar("Integer", np.int32, np.int64)


class TorchBackend(Backend):
    """Loads the weights when it is constructed; `start` runs a forward."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "auto",
        device: str = "auto",
        batch_invariant: bool | None = None,  # None: on a GPU in half precision, where it costs nothing
        quantization: str | None = None,  # None, fp8
        kv_cache_dtype: str = "auto",  # auto, fp8, fp8_e4m3
        prefix_attention_dtype: str = "auto",  # auto, fp8
        token_budget: int | None = None,
        prefix_cache_bytes: int | None = None,
        weight_cache: bool = True,
        is_coarse: bool = False,  # fewer token buckets on a GPU, so that fewer CUDA graphs are captured?
        max_loras: int = 0,  # slots for LoRA adapters
        max_lora_rank: int = 16,
    ) -> None:
        self.config = checkpoint.config
        self._device = resolve_device(device)
        weight_dtype = resolve_dtype(dtype, self._device)
        self._dtype = resolve_compute_dtype(weight_dtype, self._device)
        self._is_cpu = self._device.type == "cpu"
        self._workers = Workers(
            torch.get_num_threads() if self._is_cpu else None, splits_operations=self._is_cpu and gemms_take_all_cores()
        )
        is_fp8, kv_format = quantization is not None, kv_format_of(kv_cache_dtype, prefix_attention_dtype)
        if is_fp8:
            check_fp8(self.config, weight_dtype, self._device)
        check_kv_format(kv_format, self.config, self._dtype, self._device)
        if weight_cache and weight_dtype == torch.bfloat16:
            checkpoint = with_bfloat16_weights(checkpoint)
        weights = pack_weights(
            load_weights(checkpoint, weight_dtype, self._device, self._workers, is_fp8=is_fp8),
            CPU_TILE_ROWS,
            self._workers,
        )
        wide: Sequence[Mapping[Matrix, Tensor]] = ()
        if can_widen(weights, max_loras, max_lora_rank):
            weights, wide = widened(weights, self.config, max_loras, max_lora_rank)
        self._ops = choose_elementwise_ops(self.config, self._dtype, self._device)
        tile_rows: int | None = CPU_TILE_ROWS
        row_counts = None
        if not self._is_cpu:
            tile_rows, row_counts = choose_rows(weights.layers[0], self._dtype, batch_invariant, self._ops)
        if wide and not keeps_bits(weights.layers[0], wide[0], row_counts):
            log.info("LoRA adapters have kernels of their own here: GEMMs with their columns give other bits")
            wide = ()
        self._transformer = Transformer(
            self.config, weights, tile_rows, self._workers, self._ops, self._dtype, row_counts
        )
        self._loras = self._make_loras(max_loras, max_lora_rank, wide)  # before the KV cache, which takes what is left
        self._heads = Heads(self._transformer, self._workers, self._loras)
        self.info = replace(
            _make_info(self.config, self._device, self._dtype, token_budget, prefix_cache_bytes, kv_format),
            dtype=dtype_name(weight_dtype),
            quantization=quantization,
            batch_invariant=tile_rows is not None or row_counts is not None,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank if max_loras else 0,
        )
        if self._is_cpu:
            self.info = replace(self.info, token_multiple=self._transformer.smallest_tile or CPU_TILE_ROWS)
        self._paged = self._choose_paged(is_coarse=is_coarse, kv_format=kv_format)

    def _choose_paged(self, *, is_coarse: bool, kv_format: KVFormat) -> PagedRunner | None:
        """The paged runner, with its facts in `info`; None: there is none."""
        paged = choose_paged_runner(
            self._transformer,
            self._ops,
            self.info,
            is_coarse=is_coarse,
            loras=self._loras,
            kv_format=kv_format,
        )
        if paged is not None:
            self.info = replace(
                self.info,
                token_buckets=paged.buckets,
                max_kv_blocks_read=paged.max_kv_blocks_read,
                wave_tokens=paged.wave_tokens,
                attention="paged",
            )
            if paged.capture is not None:
                self._heads.capture(paged.capture)
        return paged

    def start(self, batch: ForwardBatch) -> RunningForward:
        """Run a forward on a CPU; on a GPU queue it, with the copies of its results to the host."""
        return self._workers.drive(lambda: self._start(batch))

    def _start(self, batch: ForwardBatch) -> RunningForward:
        if self._paged is not None and not _has_dense_mask(batch):
            return self._run_paged(self._paged, batch)
        scored = read_tokens(batch, self.config.pooling)
        lora = self._lora_rows(batch.lora_slots)
        output = self._transformer(
            token_ids=self._to_device(self._padded(batch.token_ids)),
            positions=self._to_device(self._padded(batch.positions)),
            attention=self._attention(batch),
            prefixes=gather_blocks(batch.prefixes),
            score_tokens=self._to_device(self._padded(scored)),  # rows of the last layer's GEMMs too
            cache_tokens=token_index(tokens_to_cache(batch), self._device) if batch.cache_segments else None,
            overrides=embedding_rows(batch, self._device),
            lora=lora,
            scored_lora=None if lora is None or not len(scored) else lora.take(scored),
        )
        blocks = split_blocks(batch, output.keys_values)
        hidden = output.hidden[: len(scored)]
        if self.config.pooling == "mean" and len(scored):
            hidden = mean_of_segments(hidden, batch)
        return self._running(batch, blocks, hidden)

    def _run_paged(self, paged: PagedRunner, batch: ForwardBatch) -> RunningForward:
        blocks, hidden = paged.start(batch)
        try:
            return self._running(batch, blocks, hidden)
        except BaseException:
            for block in blocks:
                block.release()
            raise

    def _running(self, batch: ForwardBatch, blocks: tuple[KVBlock, ...], hidden: Tensor | None) -> RunningForward:
        """`hidden` [R, D] of the scored tokens."""
        if hidden is None or not len(hidden):
            return RunningForward(blocks, self._waiting(ForwardOutput(_no_logits(batch), None, blocks)))
        if batch.top_k:
            return RunningForward(blocks, self._read_vocabulary(batch, blocks, hidden))
        logits, lse = self._read_head(batch, hidden)
        pooled = Download(hidden) if batch.need_hidden else None

        def wait() -> ForwardOutput:
            return ForwardOutput(
                logits.wait(),
                None if lse is None else lse.wait(),
                blocks,
                None if pooled is None else pooled.wait(),
            )

        return RunningForward(blocks, wait)

    def _read_vocabulary(
        self, batch: ForwardBatch, blocks: tuple[KVBlock, ...], hidden: Tensor
    ) -> Callable[[], ForwardOutput]:
        """One pass over the vocabulary, with its results on their way to the host."""
        token_ids = self._to_device(batch.label_ids[:, 0])
        scores = self._heads.vocabulary(batch, self._for_head(hidden), token_ids)
        logits, lse, top_logits = Download(scores.token_logits), Download(scores.logsumexp), Download(scores.top_logits)
        top_ids = Download(scores.top_ids)
        pooled = Download(hidden) if batch.need_hidden else None

        def wait() -> ForwardOutput:
            return ForwardOutput(
                logits.wait()[:, None],
                lse.wait(),
                blocks,
                None if pooled is None else pooled.wait(),
                top_logits.wait(),
                top_ids.wait().astype(np.int32),
            )

        return wait

    def _waiting(self, output: ForwardOutput) -> Callable[[], ForwardOutput]:
        """Returns the output once the device has computed all that is queued now."""
        if self._is_cpu:
            return lambda: output
        computed = torch.cuda.current_stream(self._device).record_event()

        def wait() -> ForwardOutput:
            computed.synchronize()
            return output

        return wait

    def _read_head(self, batch: ForwardBatch, hidden: Tensor) -> tuple[Download, Download | None]:
        """The label logits and, where the batch needs it, the log-sum-exp, on their way to the host."""
        hidden = self._for_head(hidden)
        logits = Download(self._heads.labels(batch, hidden))
        return logits, Download(self._heads.logsumexp(batch, hidden)) if batch.need_logsumexp else None

    def _for_head(self, hidden: Tensor) -> Tensor:
        """Hidden states are divided in place of logits: one array, whatever is read of it."""
        return hidden if self.config.logit_divisor == 1.0 else hidden / self.config.logit_divisor

    # LoRA adapters

    def _make_loras(self, max_loras: int, max_rank: int, wide: Sequence[Mapping[Matrix, Tensor]]) -> LoraSlots | None:
        if not max_loras:
            return None
        if self.config.experts is not None:
            raise BackendError("LoRA adapters are not supported for models with experts (MoE): expected max_loras 0")
        if self._transformer.weights.layers[0].fp8_scales is not None:
            raise BackendError("LoRA adapters are not supported with quantization fp8: expected max_loras 0")
        return LoraSlots(self.config, max_loras, max_rank, self._dtype, self._device, wide)

    def load_lora(self, slot: int, adapter: LoraAdapter) -> None:
        assert self._loras is not None, "adapters are loaded where there are slots for them"
        self._loras.load(slot, adapter, self._transformer.weights.head.dtype)
        self._heads.forget(slot)

    def _lora_rows(self, slots: Int32Array | None) -> LoraRows | None:
        return None if slots is None or self._loras is None else self._loras.rows(slots)

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> Sequence[Program]:
        """The programs of the paged runner. Dense masks run without them."""
        return () if self._paged is None else self._paged.programs(has_sequences=has_sequences)

    @property
    def num_compilations(self) -> int:
        return 0 if self._paged is None else self._paged.num_captured

    def is_out_of_memory(self, error: BaseException) -> bool:
        is_device = isinstance(error, torch.OutOfMemoryError)
        is_host = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
        return is_device or is_host or super().is_out_of_memory(error)

    def synchronize(self) -> None:
        if not self._is_cpu:
            torch.cuda.synchronize(self._device)

    def memory_stats(self) -> Mapping[str, int]:
        if self._is_cpu:
            return {}
        return {
            "bytes_in_use": torch.cuda.memory_allocated(self._device),
            "peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "bytes_limit": torch.cuda.get_device_properties(self._device).total_memory,
        }

    def close(self) -> None:
        self._workers.close()
        del self._transformer, self._heads
        self._loras = None
        self._paged = None
        if not self._is_cpu:
            torch.cuda.empty_cache()

    def _attention(self, batch: ForwardBatch) -> Attention:
        config = self.config
        if _has_flash(config, self._device, self._dtype):
            return VarlenAttention(batch, self._device, self._ops, is_causal=config.is_causal)
        heads_per_kv = config.num_heads // config.num_kv_heads
        is_by_width = self._dtype == torch.bfloat16 or (self._dtype == torch.float32 and has_openblas())
        pads_tiles = not (self._is_cpu and is_by_width)
        if self._is_cpu and config.is_causal and config.has_plain_attention and config.head_size % 32 == 0:
            cut = QueryCut(heads_per_kv, self._workers.num_threads, self._device, self._dtype, is_flash=True)
            few = few_tiles(batch, config.num_kv_heads, cut, padded=pads_tiles)
            if few is not None:
                return few
        return TiledAttention(
            batch,
            self._device,
            heads_per_kv,
            self._workers,
            dtype=self._dtype,
            pads_tiles=pads_tiles,
            windows=config.layer_windows,
            rule=ScoreRule(config.score_scale, config.score_softcap),
            is_causal=config.is_causal,
        )

    def _padded(self, array: NDArray[Integer]) -> NDArray[Integer]:
        """Padded with zeros to a multiple of `token_multiple`, or to fewer rows where there are few."""
        missing = -len(array) % self.info.token_multiple
        few = self._transformer.fewer_rows(len(array))
        return np.pad(array, (0, missing if few is None or not missing else few - len(array)))

    def _to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return upload(array, self._device).long()


def _no_logits(batch: ForwardBatch) -> NDArray[np.float32]:
    return np.zeros(batch.label_ids.shape, np.float32)


def _has_dense_mask(batch: ForwardBatch) -> bool:
    return batch.layout is Layout.PACKED and batch.mask == "dense"


def _has_flash(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Does PyTorch's flash attention support this model here?"""
    is_half = device.type == "cuda" and dtype != torch.float32
    return is_half and config.head_size % 8 == 0 and config.head_size <= 256 and config.has_plain_attention


def _make_info(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    token_budget: int | None,
    prefix_cache_bytes: int | None,
    kv_format: KVFormat,
) -> BackendInfo:
    is_cpu = device.type == "cpu"
    kind: DeviceKind = "cpu" if is_cpu else "gpu"
    budget = token_budget or DEFAULT_TOKEN_BUDGETS[kind]
    block_bytes = kv_block_bytes(config, dtype, kv_format)
    return BackendInfo(
        name="torch",
        device=device_title(device),
        device_kind=kind,
        dtype=dtype_name(dtype),
        compute_dtype=dtype_name(dtype),
        algorithms_bit_equal=is_cpu,
        token_multiple=CPU_TILE_ROWS if is_cpu else CUDA_TOKEN_MULTIPLE,
        token_budget=budget,
        # Without shared prefixes nothing is cached; one block is the least.
        num_kv_blocks=count_kv_blocks(block_bytes, device, prefix_cache_bytes) if config.is_causal else 1,
        kv_block_bytes=block_bytes,
        kv_cache_dtype="fp8" if kv_format == "fp8" else None,
        prefix_attention_dtype="fp8" if kv_format == "fp8_keys" else None,
        attention="varlen" if _has_flash(config, device, dtype) else "tiled",
        step_tokens=token_budget or (_cpu_step_tokens() if is_cpu else CUDA_STEP_TOKENS),
        max_whole_item=CPU_MAX_WHOLE_ITEM if is_cpu else CUDA_MAX_WHOLE_ITEM,
        reads_short_blocks=is_cpu,  # a block has memory of its own there, and is a page on CUDA
        step_seconds=STEP_SECONDS[kind],
        least_step_tokens=LEAST_STEP_TOKENS,
        joins_prefill=True,
        async_scheduling=kind == "gpu",
    )


def _cpu_step_tokens() -> int:
    return max(CPU_MIN_STEP_TOKENS, CPU_STEP_TOKENS_PER_THREAD * torch.get_num_threads())
