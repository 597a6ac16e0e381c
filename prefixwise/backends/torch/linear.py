"""The linear layers: GEMMs with a layer's weights, over tiles of rows of a few sizes.

On a CPU the weights lie as oneDNN's kernels read them. oneDNN wants weights in a layout of its own. Given plain ones it
reorders them in every GEMM, which for a tile of 128 rows takes as long as a third of the GEMM itself, and for one of 8
rows longer than that. Packed once, when the model is loaded, they replace the plain ones. The row counts of tiles are
probed with the weights that are used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.devices import gemms_take_all_cores, has_onednn, native_cpu_dtypes
from prefixwise.backends.torch.weights import ExpertWeights, LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers

log = logging.getLogger("prefixwise")

_MATRICES = ("qkv", "o", "gate_up", "down")
_PROBED = 64  # rows out and columns in of the GEMM that packing is probed with
_SMALLEST_TILE = 16  # rows: two tiles of 8 on two threads read all weights twice, and take longer than one of 16
_FEW_ROWS = (4, 8, 12)  # of the only tile of a forward

RowTile = tuple[int, int]  # its first row, and the row after its last; that may be after the last row of the forward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, I], weight [O, I] plain or packed, to [R, O]."""
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def pack_weights(weights: ModelWeights, num_rows: int, workers: Workers) -> ModelWeights:
    """Pack the weights for GEMMs of so many rows. Unchanged where PyTorch cannot pack them (`can_pack`).

    Layers are packed one by one: if the caller drops the plain ones, at most one layer per thread exists twice.
    """
    if not can_pack(weights.embedding):
        return weights
    layers = list(weights.layers)
    weights = replace(weights, layers=())

    def pack(number: int) -> None:
        layers[number] = _pack_layer(layers[number], num_rows)

    if gemms_take_all_cores():  # as does packing; and on ARM memory is used again by the thread that had it first
        for number in range(len(layers)):
            pack(number)
    else:
        workers.run(pack, range(len(layers)))
    return replace(weights, layers=tuple(layers))


def exact_row_counts(layer: LayerWeights, num_rows: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The row counts of tiles, largest first; each divides the one before it.

    The candidates are `num_rows`, twice as many, and its halves down to 16. A probe with this layer's weights and
    activations of `dtype` chooses those in whose GEMMs a row has the same bits as in GEMMs of `num_rows`.
    """
    return _exact(layer, num_rows, dtype, {count: max(count, num_rows) for count in _candidates(num_rows)})


def exact_few_rows(layer: LayerWeights, num_rows: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The row counts below those of `exact_row_counts` with the same bits, least first, for a forward of one tile."""
    return _exact(layer, num_rows, dtype, {count: 2 * count for count in _FEW_ROWS if count < num_rows})


def is_exact(layer: LayerWeights, num_rows: int, dtype: torch.dtype, count: int) -> bool:
    """Has a row the same bits in GEMMs of `count` rows, at most twice as many as `num_rows`?"""
    return bool(_exact(layer, num_rows, dtype, {count: count}))


def _exact(layer: LayerWeights, num_rows: int, dtype: torch.dtype, probed: Mapping[int, int]) -> tuple[int, ...]:
    """Those row counts in whose GEMMs as many rows as are probed have the same bits as in GEMMs of `num_rows`."""
    random = torch.Generator().manual_seed(0)
    counts = tuple(probed)
    matrices = [(getattr(layer, name), dtype) for name in _MATRICES if getattr(layer, name) is not None]
    if layer.experts is not None:  # whose router has the rows of a tile, too
        matrices.append((layer.experts.router, torch.float32))
    for weight, of_rows in matrices:
        bias = layer.qkv_bias if weight is layer.qkv else None
        x = torch.randn(2 * num_rows, weight.shape[1], generator=random).to(of_rows)
        most = max(num_rows, *probed.values())
        expected = _in_tiles(x[: -(-most // num_rows) * num_rows], weight, bias, num_rows)
        counts = tuple(count for count in counts if _has_bits(expected, x[: probed[count]], weight, bias, count))
    return counts


def exact_tiles(matrices: Sequence[Tensor], dtype: torch.dtype, sizes: Sequence[int], num_rows: int) -> tuple[int, ...]:
    """Those sizes in whose GEMMs with all matrices a row has the same bits as in GEMMs of `num_rows`, one of them."""
    random = torch.Generator().manual_seed(0)
    for weight in matrices:
        x = torch.randn(2 * max(sizes), weight.shape[1], generator=random).to(dtype)
        expected = _in_tiles(x, weight, None, num_rows)
        sizes = [size for size in sizes if _has_bits(expected, x, weight, None, size)]
    return tuple(sizes)


def _candidates(num_rows: int) -> list[int]:
    return [2 * num_rows, num_rows, *_halves(num_rows)]


def _halves(num_rows: int) -> list[int]:
    """Of 128: 64, 32, 16."""
    halves = []
    while num_rows % 2 == 0 and num_rows // 2 >= _SMALLEST_TILE:
        num_rows //= 2
        halves.append(num_rows)
    return halves


def _has_bits(expected: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, num_rows: int) -> bool:
    return torch.equal(_in_tiles(x, weight, bias, num_rows), expected[: len(x)])


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    return torch.cat([linear(tile, weight, bias) for tile in torch.split(x, num_rows)])


def cut_rows(num_rows: int, sizes: Sequence[int], num_threads: int = 1) -> list[RowTile]:
    """Cut rows into tiles of these sizes, each of which divides the one before it; the last tile may not be full.

    Every thread gets the same number of tiles of the largest size. The rows that are left are cut into the smallest
    tiles of which there is at most one per thread, and the rest of the last one into smaller tiles.
    """
    smallest = sizes[-1]
    left = -(-num_rows // smallest) * smallest
    num_largest = left // (sizes[0] * num_threads) * num_threads
    left -= num_largest * sizes[0]
    chosen = [sizes[0]] * num_largest
    largest_left = min(size for size in sizes if -(-left // size) <= num_threads)
    for size in (size for size in sizes if size <= largest_left):
        chosen += [size] * (left // size)
        left %= size
    return list(pairwise(accumulate(chosen, initial=0)))


def cut_evenly(num_rows: int, sizes: Sequence[int], num_threads: int) -> list[RowTile]:
    """The same with one tile for each thread in place of all that are not of the largest size: multiples of the
    smallest size that differ by at most one of these."""
    largest, smallest = sizes[0], sizes[-1]
    num_largest = num_rows // (largest * num_threads) * num_threads
    left = -(-(num_rows - num_largest * largest) // smallest)
    num_tiles = min(left, num_threads)
    chosen = [largest] * num_largest + [(left + place) // num_tiles * smallest for place in reversed(range(num_tiles))]
    return list(pairwise(accumulate(chosen, initial=0)))


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """[n, ..] to [size, ..] with copies of the first row."""
    missing = size - len(rows)
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows


def can_pack(weight: Tensor) -> bool:
    """On a CPU, in float32 or bfloat16 where that is native, with a PyTorch that packs correctly."""
    is_packable = weight.dtype in {torch.float32, torch.bfloat16} & native_cpu_dtypes()
    if weight.device.type != "cpu" or not is_packable or not has_onednn():
        return False
    try:
        x = torch.arange(_PROBED, dtype=weight.dtype).expand(_PROBED, _PROBED)
        plain = torch.eye(_PROBED, dtype=weight.dtype)
        return torch.equal(linear(x, _pack(plain, _PROBED)), x)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        log.warning("PyTorch cannot pack weights here, so scoring is slower than it could be: %s", error)
        return False


def _pack_layer(layer: LayerWeights, num_rows: int) -> LayerWeights:
    plain = {name: getattr(layer, name) for name in _MATRICES}
    packed: dict[str, Any] = {name: _pack(weight, num_rows) for name, weight in plain.items() if weight is not None}
    experts = None if layer.experts is None else _pack_experts(layer.experts, num_rows)
    return replace(layer, **packed, experts=experts)


def _pack_experts(experts: ExpertWeights, num_rows: int) -> ExpertWeights:
    return ExpertWeights(
        _pack(experts.router, num_rows) if can_pack(experts.router) else experts.router,
        tuple(_pack(weight, num_rows) for weight in experts.gate_up),
        tuple(_pack(weight, num_rows) for weight in experts.down),
    )


def _pack(weight: Tensor, num_rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    return packed
