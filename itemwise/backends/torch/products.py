"""Matrix products with a layer's weights; on a CPU with bfloat16 units the weights lie as these units read them.

oneDNN wants weights in tiles of its own. Given plain ones it rearranges them in every product, which for a block of 128
rows takes as long as a third of the product itself. Packed once, when the model is loaded, they take the place of the
plain ones. Numbers of rows are tried with what is used, so what is exact with plain weights is exact with packed ones.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from itemwise.backends.torch.weights import LayerWeights, ModelWeights
from itemwise.backends.torch.workers import Workers

log = logging.getLogger("itemwise")

_MATRICES = ("qkv", "o", "gate_up", "down")
_TRIED = 64  # rows out and columns in of the product that packing is tried with


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, I], weight [O, I] plain or packed, to [R, O]."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def pack_weights(weights: ModelWeights, num_rows: int, workers: Workers) -> ModelWeights:
    """For products of so many rows, layer by layer, so that no more than one for each thread is there twice, if the
    caller lets go of the plain ones. The same where it cannot be done: another dtype or device than bfloat16 on a CPU,
    or a PyTorch without it."""
    if not can_pack(weights.embedding):
        return weights
    layers = list(weights.layers)
    weights = replace(weights, layers=())

    def pack(number: int) -> None:
        layers[number] = _pack_layer(layers[number], num_rows)

    workers.run(pack, range(len(layers)))
    return replace(weights, layers=tuple(layers))


def exact_row_counts(weights: ModelWeights, num_rows: int) -> tuple[int, ...]:
    """`num_rows`, twice and half as many, largest first: those in whose products a row has the same bits as in products
    of `num_rows`. By a trial with the first layer's weights."""
    random = torch.Generator().manual_seed(0)
    counts = [2 * num_rows, num_rows, *([] if num_rows % 2 else [num_rows // 2])]
    layer = weights.layers[0]
    for name in _MATRICES:
        weight, bias = getattr(layer, name), layer.qkv_bias if name == "qkv" else None
        x = torch.randn(2 * num_rows, weight.shape[1], generator=random).to(weights.embedding.dtype)
        products = {
            count: torch.cat([linear(each, weight, bias) for each in torch.split(x, count)]) for count in counts
        }
        counts = [count for count in counts if torch.equal(products[count], products[num_rows])]
    return tuple(counts)


def can_pack(weight: Tensor) -> bool:
    """Bfloat16 on a CPU that has units for it, in a PyTorch that packs rightly."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.cpu._is_avx512_bf16_supported():
        return False
    try:
        x = torch.arange(_TRIED, dtype=torch.bfloat16).expand(_TRIED, _TRIED)
        plain = torch.eye(_TRIED, dtype=torch.bfloat16)
        return torch.equal(linear(x, _pack(plain, _TRIED)), x)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        log.warning("PyTorch cannot pack weights here, so scoring is slower than it could be: %s", error)
        return False


def _pack_layer(layer: LayerWeights, num_rows: int) -> LayerWeights:
    packed = {name: _pack(getattr(layer, name), num_rows) for name in _MATRICES}
    return replace(layer, **packed)


def _pack(weight: Tensor, num_rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    return packed
