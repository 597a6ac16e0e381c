"""LoRA adapters on the device: their matrices by slot, and what they add to the rows of linear layers.

Rows of the model itself keep the bits that they have without adapters beside them. An adapter's rows are taken out of
their tile and multiplied in GEMMs of one fixed number of rows, so a row has the same bits whichever rows are beside it.
On CUDA kernels do the same without taking rows out (`cuda/lora_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.devices import dtype_name, upload
from prefixwise.backends.torch.linear import RowTile, pad_rows
from prefixwise.backends.torch.weights import ModelWeights
from prefixwise.contract.errors import BackendError, ModelLoadError
from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.models.config import ModelConfig
from prefixwise.models.lora import MATRICES, LoraAdapter, Matrix, matrix_shape, num_parts

CPU_ROWS, CUDA_ROWS = 32, 256  # of a GEMM with an adapter's matrices, where no kernel has them
_MAX_NUMBERS = 1 << 31  # of a matrix of all slots: kernels count them in int32
_MAX_TAIL = 256  # columns that a wide matrix may have more; with more, GEMMs take longer than kernels of their own

# [T, in], [T, out] to be changed, [T] slots, [slots + 1, R, in], [slots + 1, out, R], R ranks in all
AddKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
AddLora = Callable[[Matrix, Tensor, Tensor], Tensor]  # x [R, in] and out [R, rows out], which it changes and returns


def no_lora(matrix: Matrix, x: Tensor, out: Tensor) -> Tensor:
    """Rows without adapters."""
    return out


@dataclass(frozen=True)
class StackedPair:
    """The matrices of all slots for one matrix of a layer; slot 0 is zeros. Their addresses stay the same."""

    a: Tensor  # [slots + 1, R, columns in]
    b: Tensor  # [slots + 1, rows out, R]


class LoraSlots:
    """Adapters of up to `max_rank` in slots from 1. Matrices are as wide as the ranks of all parts together."""

    def __init__(
        self,
        config: ModelConfig,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        wide: Sequence[Mapping[Matrix, Tensor]] = (),  # of each layer: matrices with room for B's (`widened`)
    ) -> None:
        self.max_loras = max_loras
        self.wide = wide
        self._device = device
        self._heads: dict[int, Tensor] = {}
        self.add_kernel: AddKernel | None = None  # set where kernels work
        self.layers: list[dict[Matrix, StackedPair]] = []
        for _ in range(config.num_layers):
            stacked: dict[Matrix, StackedPair] = {}
            for matrix in MATRICES:
                (rows, columns), width = matrix_shape(config, matrix), lora_width(matrix, max_rank)
                if (max_loras + 1) * width * max(rows, columns) >= _MAX_NUMBERS:
                    message = f"adapters of rank {max_rank} are too large for so many slots: expected fewer max_loras"
                    raise BackendError(f"{message}, got {max_loras}")
                stacked[matrix] = StackedPair(
                    torch.zeros((max_loras + 1, width, columns), dtype=dtype, device=device),
                    torch.zeros((max_loras + 1, rows, width), dtype=dtype, device=device),
                )
            self.layers.append(stacked)

    def load(self, slot: int, adapter: LoraAdapter, head_dtype: torch.dtype) -> None:
        """Between forwards. `head_dtype`: that of the model's head."""
        for number, (stacked, pairs) in enumerate(zip(self.layers, adapter.layers, strict=True)):
            for matrix, target in stacked.items():
                target.a[slot].zero_()
                target.b[slot].zero_()
                pair = pairs.get(matrix)
                if pair is not None:
                    target.a[slot, : len(pair.a)].copy_(torch.from_numpy(pair.a))
                    target.b[slot, :, : len(pair.a)].copy_(torch.from_numpy(pair.b))
                if self.wide and matrix in self.wide[number]:
                    self._load_tail(slot, self.wide[number][matrix], target)
        self._heads.pop(slot, None)
        if adapter.head is not None:
            self._heads[slot] = torch.from_numpy(adapter.head).to(device=self._device, dtype=head_dtype)

    @property
    def tails(self) -> tuple[int, int, int]:
        """Columns of adapters behind the inputs of `qkv` and `gate_up`, of `o`, and of `down`."""
        if not self.wide:
            return 0, 0, 0
        widths = {matrix: self.max_loras * pair.a.shape[1] for matrix, pair in self.layers[0].items()}
        return max(widths["qkv"], widths["gate_up"]), widths["o"], widths["down"]

    def _load_tail(self, slot: int, wide: Tensor, pair: StackedPair) -> None:
        """The slot's B, behind the matrix's own columns. Other rows have zeros for it, and 0 times inf is no number."""
        if not pair.b[slot].isfinite().all():
            dtype = dtype_name(wide.dtype)
            raise ModelLoadError(f"an adapter must have numbers within the range of {dtype}, got larger ones")
        width, columns = pair.b.shape[2], pair.a.shape[2]
        wide[:, columns + (slot - 1) * width :][:, :width].copy_(pair.b[slot])

    def head(self, slot: int) -> Tensor | None:
        """The adapter's own head, [V, D] or [classes, D]; None: it has the model's."""
        return self._heads.get(slot)

    def head_rows(self, slots: Int32Array) -> list[HeadRows]:
        """Scored rows with these slots by their heads; none if all of them have the model's."""
        own = np.where(np.isin(slots, list(self._heads)), slots, 0)
        if not own.any():
            return []
        rows = {int(slot): np.flatnonzero(own == slot) for slot in np.unique(own)}
        return [HeadRows(slot, each, upload(each, self._device)) for slot, each in rows.items()]

    def rows(self, slots: Int32Array) -> LoraRows:
        """Those of a forward with these slots."""
        return LoraRows(self, slots, upload(slots, self._device))


def lora_width(matrix: Matrix, max_rank: int) -> int:
    """The ranks of all parts, as a multiple of 16: kernels take no fewer."""
    return -(-num_parts(matrix) * max_rank // 16) * 16


def widened(
    weights: ModelWeights, config: ModelConfig, max_loras: int, max_rank: int
) -> tuple[ModelWeights, list[dict[Matrix, Tensor]]]:
    """Matrices with columns for the B's of all slots behind their own, zeros at first; and the weights, which are views
    of them. Layer by layer: one of them exists twice."""
    layers, found = list(weights.layers), []
    weights = replace(weights, layers=())
    for number, layer in enumerate(layers):
        wide: dict[Matrix, Tensor] = {}
        for matrix in MATRICES:
            narrow: Tensor = getattr(layer, matrix)
            wide[matrix] = F.pad(narrow, (0, max_loras * lora_width(matrix, max_rank)))
        qkv, o, gate_up, down = (wide[matrix][:, : matrix_shape(config, matrix)[1]] for matrix in MATRICES)
        layers[number] = replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)
        found.append(wide)
    return replace(weights, layers=tuple(layers)), found


def can_widen(weights: ModelWeights, max_loras: int, max_rank: int) -> bool:
    """On CUDA in half precision, with few adapters, and where matrices are neither experts' nor codes."""
    first = weights.layers[0]
    is_plain = first.experts is None and first.fp8_scales is None
    is_half = first.o.is_cuda and first.o.dtype != torch.float32
    tail = max_loras * max(lora_width(matrix, max_rank) for matrix in MATRICES)
    return is_plain and is_half and 0 < tail <= _MAX_TAIL


@dataclass(frozen=True)
class LoraRows:
    """The slots of the rows of a forward, on the host and on the device."""

    adapters: LoraSlots
    slots: Int32Array  # [T]
    on_device: Tensor  # [T]
    _tiles: dict[RowTile, TileLora] = field(default_factory=dict)

    def of_layer(self, number: int) -> LayerLora:
        return LayerLora(self, number)

    def tile(self, tile: RowTile) -> TileLora:
        """Those of a tile. Rows behind the last row of the forward are padding, and have no adapter."""
        if tile not in self._tiles:
            start, stop = tile
            self._tiles[tile] = TileLora(
                self.adapters, self.slots[start:stop], self.on_device[start:stop], stop - start
            )
        return self._tiles[tile]

    def take(self, tokens: Int64Array) -> LoraRows:
        """Those of some tokens, in their order."""
        return self.adapters.rows(self.slots[tokens])


class LayerLora(NamedTuple):
    """The rows of a forward in one layer."""

    rows: LoraRows
    number: int

    def adding(self, tile: RowTile) -> AddLora:
        """What adds the adapters' parts to the rows of a tile."""
        return partial(self.rows.tile(tile).add, self.number)


class TileLora:
    """The rows of one tile that have adapters."""

    def __init__(self, adapters: LoraSlots, slots: Int32Array, on_device: Tensor, num_rows: int) -> None:
        self._adapters = adapters
        self._on_device = on_device if len(slots) == num_rows else F.pad(on_device, (0, num_rows - len(slots)))
        found = [int(slot) for slot in np.unique(slots) if slot]
        self.is_empty = not found
        self._rows: Sequence[tuple[int, Tensor]] = ()
        if adapters.add_kernel is None:
            self._rows = [(slot, upload(np.flatnonzero(slots == slot), on_device.device)) for slot in found]

    def add(self, layer: int, matrix: Matrix, x: Tensor, out: Tensor) -> Tensor:
        """Add B (A x) of each row's adapter to `out`, in place: x [R, in], out [R, rows out]."""
        if self.is_empty:
            return out
        pair = self._adapters.layers[layer][matrix]
        if self._adapters.add_kernel is not None:
            self._adapters.add_kernel(x, out, self._on_device, pair.a, pair.b)
            return out
        for slot, rows in self._rows:
            out[rows] += _product(x[rows], pair.a[slot], pair.b[slot])
        return out


def _product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """B (A x), in GEMMs of a fixed number of rows."""
    num_rows = CUDA_ROWS if x.is_cuda else CPU_ROWS
    tiles = [F.linear(F.linear(pad_rows(tile, num_rows), a), b) for tile in torch.split(x, num_rows)]
    return torch.cat(tiles)[: len(x)]


class HeadRows(NamedTuple):
    """The scored rows of a forward that one head reads."""

    slot: int  # 0: the model's own head
    rows: Int64Array
    on_device: Tensor  # the same
