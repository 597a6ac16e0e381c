"""A mixture of experts in PyTorch: each token runs through a few experts, in GEMMs that hold the rows of one expert.

Rows of one expert come from all over the batch, so their number depends on every token of it. On a CPU they run in
tiles of fixed row counts, in all of which a row has the same bits; copies of the first row pad the last tile. A token's
outputs are added in the order of its own experts. So its bits do not depend on how many rows an expert got.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prefixwise.backends.torch.elementwise import ElementwiseOps
from prefixwise.backends.torch.linear import cut_rows, exact_tiles, linear, pad_rows
from prefixwise.backends.torch.weights import ExpertWeights
from prefixwise.backends.torch.workers import Workers
from prefixwise.models.config import ExpertsConfig, ModelConfig

# Rows of an expert's GEMMs on a CPU. An expert often has few: those of 16 rows are what others are compared with.
_CPU_TILES, _CPU_REFERENCE = (128, 64, 32, 16, 8, 4), 16
_ACCELERATOR_ROWS = 256  # from this many rows on cuBLAS adds in one order for any number of rows


class Routing(NamedTuple):
    """The experts of each token, the one with the largest weight first."""

    weights: Tensor  # [T, experts per token] float32
    numbers: Tensor  # [T, experts per token]


def route(logits: Tensor, config: ExpertsConfig) -> Routing:
    """logits [T, E] float32: softmax over all experts, then the largest."""
    weights, numbers = torch.topk(torch.softmax(logits, -1), config.experts_per_token, dim=-1)
    return Routing(weights / weights.sum(-1, keepdim=True) if config.norms_weights else weights, numbers)


def add_outputs(weights: Tensor, outputs: Tensor) -> Tensor:
    """weights [T, k] and outputs [T, k, D] to [T, D] in the outputs' dtype, added in float32 in the order of k."""
    total = weights[:, :1] * outputs[:, 0]
    for number in range(1, weights.shape[1]):
        total += weights[:, number : number + 1] * outputs[:, number]
    return total.to(outputs.dtype)


@dataclass(frozen=True)
class _Tile:
    """Rows of one expert."""

    expert: int
    first: int  # in the list of all rows, those of one expert after those of another
    last: int  # the row after its last
    num_rows: int  # of its GEMMs: more than it has where it is padded


class ExpertRunner:
    """Runs the experts of a layer over all tokens of a forward."""

    def __init__(
        self, config: ModelConfig, ops: ElementwiseOps, workers: Workers, tile_sizes: tuple[int, ...] | None
    ) -> None:
        assert config.experts is not None
        self._config, self._experts = config, config.experts
        self._ops, self._workers = ops, workers
        self._tile_sizes = tile_sizes  # largest first, each divides the one before it; None: one tile for an expert

    def __call__(self, weights: ExpertWeights, x: Tensor, numbers: Tensor) -> Tensor:
        """x [T, D], each token's experts [T, k] to their outputs [T, k, D]."""
        num_choices = self._experts.experts_per_token
        flat = numbers.flatten()
        order = torch.argsort(flat, stable=True)  # the choices of expert 0, those of expert 1, ...
        rows = order // num_choices
        outputs = x.new_empty(len(flat), x.shape[1])

        def run(tile: _Tile) -> None:
            of_tile = slice(tile.first, tile.last)
            inner = pad_rows(x[rows[of_tile]], tile.num_rows)
            inner = linear(inner, _in_dtype(weights.gate_up[tile.expert], x.dtype))
            inner = self._ops.gate(inner, self._config.activation)
            done = linear(inner, _in_dtype(weights.down[tile.expert], x.dtype))
            outputs[order[of_tile]] = done[: tile.last - tile.first]

        counts = torch.bincount(flat, minlength=self._experts.num_experts).tolist()
        self._workers.run(run, self._cut(counts))
        return outputs.view(*numbers.shape, -1)

    def _cut(self, counts: list[int]) -> list[_Tile]:
        tiles, first = [], 0
        for expert, count in enumerate(counts):
            sizes = self._tile_sizes
            if sizes is None:
                cut = [(0, -(-count // _ACCELERATOR_ROWS) * _ACCELERATOR_ROWS)] if count else []
            else:
                cut = cut_rows(count, sizes)
            tiles += [_Tile(expert, first + a, first + min(b, count), b - a) for a, b in cut]
            first += count
        return tiles


def choose_tile_sizes(
    weights: ExpertWeights, dtype: torch.dtype, *, is_cpu: bool, is_invariant: bool
) -> tuple[int, ...] | None:
    """On a CPU those sizes in which a probe finds the same bits for a row; elsewhere one, or none that is fixed."""
    if not is_cpu:
        return (_ACCELERATOR_ROWS,) if is_invariant else None
    matrices = [_in_dtype(each, dtype) for each in (weights.gate_up[0], weights.down[0])]
    return exact_tiles(matrices, dtype, _CPU_TILES, _CPU_REFERENCE)


def _in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain matrix in the dtype of activations, where that is wider: one matrix at a time is converted."""
    return weight if weight.is_mkldnn else weight.to(dtype)
