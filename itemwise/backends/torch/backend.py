"""`TorchBackend`: a checkpoint on a CPU or a CUDA device, ready to run forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from itemwise.backends.base import DEFAULT_TOKEN_BUDGETS, Backend, BackendInfo, ForwardBatch, ForwardOutput, PrefixState
from itemwise.backends.torch.attention import Attention, KeysValues, TiledAttention
from itemwise.backends.torch.head import label_logits, log_normalizers
from itemwise.backends.torch.model import Transformer
from itemwise.backends.torch.row_ops import choose_row_ops
from itemwise.backends.torch.upload import upload
from itemwise.backends.torch.varlen import VarlenAttention
from itemwise.backends.torch.weights import load_weights
from itemwise.backends.torch.workers import Workers
from itemwise.contract.errors import BackendError
from itemwise.contract.ragged import ranges
from itemwise.models.checkpoint import Checkpoint

CPU_BLOCK_ROWS = 128
CUDA_TOKEN_MULTIPLE = 256  # from this many rows on cuBLAS adds in one order, whatever the number of rows
CUDA_INVARIANT_ROWS = 2048  # rows of a block under `batch_invariant`

Integer = TypeVar("Integer", np.int32, np.int64)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TorchPrefix(PrefixState):
    """Keys and values of a prefix, one pair of [S, K, H] per layer."""

    layers: tuple[KeysValues, ...]

    @property
    def num_bytes(self) -> int:
        return sum(k.numel() * k.element_size() + v.numel() * v.element_size() for k, v in self.layers)


class TorchBackend(Backend):
    """Loads the weights when it is made; `forward` is the rest."""

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: str = "auto", device: str = "auto", batch_invariant: bool = False
    ) -> None:
        self.config = checkpoint.config
        self._device = _resolve_device(device)
        self._dtype = _resolve_dtype(dtype, self._device)
        self._is_cpu = self._device.type == "cpu"
        self._workers = Workers(torch.get_num_threads() if self._is_cpu else None)
        multiple = CPU_BLOCK_ROWS if self._is_cpu else CUDA_TOKEN_MULTIPLE
        block_rows = CPU_BLOCK_ROWS if self._is_cpu else CUDA_INVARIANT_ROWS if batch_invariant else None
        self.info = BackendInfo(
            name="torch",
            device=_device_title(self._device),
            device_kind="cpu" if self._is_cpu else "gpu",
            dtype=str(self._dtype).removeprefix("torch."),
            algorithms_bit_equal=self._is_cpu,
            token_multiple=multiple,
            token_budget=DEFAULT_TOKEN_BUDGETS["cpu" if self._is_cpu else "gpu"],
        )
        weights = load_weights(checkpoint, self._dtype, self._device)
        self._row_ops = choose_row_ops(self.config, self._dtype, self._device)
        self._transformer = Transformer(self.config, weights, block_rows, self._workers, self._row_ops)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        return self._workers.drive(lambda: self._forward(batch))

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        output = self._transformer(
            token_ids=self._to_device(self._padded(batch.token_ids)),
            positions=self._to_device(self._padded(batch.positions)),
            attention=self._attention(batch),
            prefixes=[_layers_of(prefix) for prefix in batch.prefixes],
            score_tokens=self._to_device(self._padded(batch.score_tokens)),  # rows of the last layer's products too
            keep_tokens=self._to_device(_kept_tokens(batch)) if batch.keep_segments else None,
        )
        kept = _split_prefixes(batch, output.keys_values)
        if not len(batch.score_tokens):
            return ForwardOutput(np.zeros(batch.label_ids.shape, np.float32), None, kept)
        head = self._transformer.weights.head
        hidden = output.hidden[: len(batch.score_tokens)]
        logits = label_logits(hidden, head, batch.label_ids)
        normalizers = None
        if batch.need_normalizers:
            normalizers = log_normalizers(hidden, head, self._workers).cpu().numpy()
        return ForwardOutput(logits.cpu().numpy(), normalizers, kept)

    def synchronize(self) -> None:
        if not self._is_cpu:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._workers.close()
        del self._transformer
        if not self._is_cpu:
            torch.cuda.empty_cache()

    def _attention(self, batch: ForwardBatch) -> Attention:
        if self._is_cpu or self._dtype == torch.float32 or self.config.head_size % 8 or self.config.head_size > 256:
            heads_per_kv = self.config.num_heads // self.config.num_kv_heads
            return TiledAttention(batch, self._device, heads_per_kv, self._workers)
        return VarlenAttention(batch, self._device, self._row_ops)

    def _padded(self, array: NDArray[Integer]) -> NDArray[Integer]:
        """With zeros up to a multiple of the tokens that a forward is padded to."""
        return np.pad(array, (0, -len(array) % self.info.token_multiple))

    def _to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> torch.Tensor:
        return upload(array, self._device).long()


def _resolve_device(device: str) -> torch.device:
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
    if resolved.type not in ("cpu", "cuda"):
        raise BackendError(f"device {device!r} is not supported by the torch backend; expected cpu or cuda")
    return resolved


def _resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where matrix units take it, else float32."""
    if dtype == "auto":
        fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise BackendError(f"unknown dtype {dtype!r}; expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _device_title(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _layers_of(prefix: PrefixState | int) -> Sequence[KeysValues] | None:
    if isinstance(prefix, int):
        return None
    assert isinstance(prefix, TorchPrefix), "a prefix of another backend"
    return prefix.layers


def _kept_tokens(batch: ForwardBatch) -> NDArray[np.int64]:
    segments = np.asarray(batch.keep_segments)
    return ranges(batch.segment_starts[segments], np.diff(batch.segment_starts)[segments])


def _split_prefixes(batch: ForwardBatch, keys_values: Sequence[KeysValues]) -> tuple[TorchPrefix, ...]:
    lens = [int(batch.segment_starts[s + 1] - batch.segment_starts[s]) for s in batch.keep_segments]
    if len(lens) == 1:
        return (TorchPrefix(lens[0], tuple(keys_values)),)
    # Copies, so that dropping one prefix gives its memory back whatever happens to the others.
    layers = [[(k.clone(), v.clone()) for k, v in zip(*_split(pair, lens), strict=True)] for pair in keys_values]
    return tuple(TorchPrefix(n, tuple(layer[i] for layer in layers)) for i, n in enumerate(lens))


def _split(pair: KeysValues, lens: list[int]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return torch.split(pair[0], lens), torch.split(pair[1], lens)
