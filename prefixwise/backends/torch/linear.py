"""GEMMs with a layer's weights; on a CPU the weights lie as oneDNN's kernels read them.

oneDNN wants weights in a layout of its own. Given plain ones it reorders them in every GEMM, which for a tile of 128
rows takes as long as a third of the GEMM itself, and for one of 8 rows longer than that. Packed once, when the model is
loaded, they take the place of the plain ones. The row counts of tiles are probed with the weights that are used.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.devices import has_onednn, native_cpu_dtypes
from prefixwise.backends.torch.weights import LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers

log = logging.getLogger("prefixwise")

_MATRICES = ("qkv", "o", "gate_up", "down")
_PROBED = 64  # rows out and columns in of the GEMM that packing is probed with
_SMALLEST_TILE = 16  # rows: two tiles of 8 on two threads read all weights twice, and take longer than one of 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, I], weight [O, I] plain or packed, to [R, O]."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def pack_weights(weights: ModelWeights, num_rows: int, workers: Workers) -> ModelWeights:
    """For GEMMs of so many rows, layer by layer, so that no more than one layer for each thread is there twice, if the
    caller lets go of the plain ones. Unchanged where it cannot be done (`can_pack`)."""
    if not can_pack(weights.embedding):
        return weights
    layers = list(weights.layers)
    weights = replace(weights, layers=())

    def pack(number: int) -> None:
        layers[number] = _pack_layer(layers[number], num_rows)

    workers.run(pack, range(len(layers)))
    return replace(weights, layers=tuple(layers))


def exact_row_counts(layer: LayerWeights, num_rows: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The row counts of tiles, largest first; each divides the one before it.

    Of `num_rows`, twice as many, and its halves down to 16: those in whose GEMMs a row has the same bits as in GEMMs of
    `num_rows`. By a probe with this layer's weights and activations of `dtype`.
    """
    random = torch.Generator().manual_seed(0)
    counts = [2 * num_rows, num_rows, *_halves(num_rows)]
    for name in _MATRICES:
        weight, bias = getattr(layer, name), layer.qkv_bias if name == "qkv" else None
        x = torch.randn(2 * num_rows, weight.shape[1], generator=random).to(dtype)
        expected = _in_tiles(x, weight, bias, num_rows)
        counts = [count for count in counts if _has_bits(expected, x[: max(count, num_rows)], weight, bias, count)]
    return tuple(counts)


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
    packed = {name: _pack(getattr(layer, name), num_rows) for name in _MATRICES}
    return replace(layer, **packed)


def _pack(weight: Tensor, num_rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    return packed
