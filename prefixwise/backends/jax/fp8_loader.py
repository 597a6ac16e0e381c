"""Matrices of the layers in FP8, made while they are loaded.

A piece of a matrix is read as `weight_loader` reads it and sent to the devices, where one program quantises it and
writes codes and scales in place: beside the FP8 model there are never more than two pieces. Codes that a checkpoint
stores with one scale per row, or per tensor, are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from prefixwise.backends.jax.fp8 import FP8, quantise_rows
from prefixwise.backends.jax.mesh import TENSOR, P, put_sharded
from prefixwise.backends.jax.placement import fill_sequences
from prefixwise.backends.jax.weight_loader import Plan, Shards, allocate_zeros, plan_columns, plan_rows
from prefixwise.contract.ragged import Int64Array
from prefixwise.models.checkpoint import StoredTensor
from prefixwise.models.quantization.tensors import QuantisedTensor

_CODES, _SCALES = np.dtype(FP8), np.dtype(np.float32)


class Fp8Arrays(NamedTuple):
    """A matrix of all layers."""

    codes: jax.Array  # [layers, rows, columns]
    scales: jax.Array  # [layers, rows] float32


@dataclass(frozen=True)
class _StoredCodes(StoredTensor):
    """The codes of a tensor."""

    tensor: QuantisedTensor

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return self.tensor.read_codes(start, stop)[0].view(_CODES)


@dataclass(frozen=True)
class _StoredScales(StoredTensor):
    """The scales of its rows."""

    tensor: QuantisedTensor

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return self.tensor.read_codes(start, stop)[1]


class _Matrix(NamedTuple):
    """A matrix to load."""

    layers: Sequence[Sequence[StoredTensor]]  # of each layer the parts, one above the other
    numbers: Plan
    codes: Plan  # the same of stored codes; reads only layers that have them
    scale_rows: Int64Array  # [shards of the rows, rows]: of the parts, -1 for a row of zeros


class Fp8Loader:
    """Makes codes and scales on one mesh. An `index` [tp, n] says which source rows each shard holds."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def split_rows(self, layers: Sequence[Sequence[StoredTensor]], index: Int64Array) -> Fp8Arrays:
        """[layers, tp x n, columns]: the parts of each layer one above the other, rows and scales split."""
        codes = [_codes_of(parts) for parts in layers]
        return self._make(_Matrix(layers, plan_rows(layers, index), plan_rows(codes, index), index))

    def split_columns(self, layers: Sequence[StoredTensor], index: Int64Array) -> Fp8Arrays:
        """[layers, rows, tp x n]: one tensor per layer, its columns split. A scale is that of the whole row."""
        parts = [(tensor,) for tensor in layers]
        codes = [_codes_of(each)[0] for each in parts]
        rows = np.arange(layers[0].shape[0])[None]
        return self._make(_Matrix(parts, plan_columns(layers, index), plan_columns(codes, index), rows))

    def _make(self, matrix: _Matrix) -> Fp8Arrays:
        plan = matrix.numbers
        scale_spec = P(None, TENSOR) if plan.split_axis == 0 else P()
        made = Fp8Arrays(
            allocate_zeros(plan.shape, _CODES, NamedSharding(self._mesh, plan.spec)),
            allocate_zeros(plan.shape[:2], _SCALES, NamedSharding(self._mesh, scale_spec)),
        )
        dtype = _dtype_of(matrix.layers)
        row_bytes = dtype.itemsize * NamedSharding(self._mesh, plan.spec).shard_shape(plan.shape)[-1]
        step, pieces = plan.pieces(row_bytes)
        for layer, start in pieces:
            piece, scales = self._read(matrix, layer, start, step, dtype)
            made.codes.block_until_ready()  # this piece was read while the previous one was written
            specs = plan.spec, plan.piece_spec, scale_spec
            made = _write(self._mesh, *specs, made, piece, scales, np.int32(layer), np.int32(start))
        return made

    def _read(
        self, matrix: _Matrix, layer: int, start: int, step: int, dtype: np.dtype[Any]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Numbers and None, or codes and the scales of their rows; on the devices."""
        parts, is_codes = matrix.layers[layer], _are_codes(matrix.layers[layer])
        plan = matrix.codes if is_codes else matrix.numbers
        num_rows = step * self._mesh.shape[TENSOR] if plan.split_axis == 0 else step
        sharding = NamedSharding(self._mesh, plan.piece_spec)
        shards = Shards.allocate(sharding, (num_rows, plan.shape[-1]), plan.split_axis, _CODES if is_codes else dtype)
        fill = plan.read(layer, start, start + step)
        for shard, part in shards.parts.items():
            fill(shard, part)
        if not is_codes:
            return shards.put(), None
        scales = np.empty(num_rows, np.float32)
        stored = [_StoredScales(part.shape[:1], "float32", part) for part in _quantised(parts)]
        fill_sequences(scales, stored, matrix.scale_rows[:, start : start + step].reshape(-1))
        return shards.put(), put_sharded(self._mesh, scales, P(*plan.piece_spec[:1]))


def _quantised(parts: Sequence[StoredTensor]) -> list[QuantisedTensor]:
    return [part for part in parts if isinstance(part, QuantisedTensor) and part.is_fp8_by_rows]


def _are_codes(parts: Sequence[StoredTensor]) -> bool:
    return len(_quantised(parts)) == len(parts)


def _codes_of(parts: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
    """The stored codes of a layer's parts; the parts themselves where some have none."""
    if not _are_codes(parts):
        return parts
    return [_StoredCodes(part.shape, "float8_e4m3fn", part) for part in _quantised(parts)]


def _dtype_of(layers: Sequence[Sequence[StoredTensor]]) -> np.dtype[Any]:
    """In which pieces are sent: bfloat16 where that holds the numbers as they are stored."""
    is_bfloat16 = all(part.dtype == "bfloat16" for parts in layers for part in parts)
    return np.dtype(jnp.bfloat16 if is_bfloat16 else np.float32)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _write(
    mesh: Mesh,
    array_spec: PartitionSpec,
    piece_spec: PartitionSpec,
    scale_spec: PartitionSpec,
    arrays: Fp8Arrays,
    piece: jax.Array,
    scales: jax.Array | None,
    layer: jax.Array,
    row: jax.Array,
) -> Fp8Arrays:
    """Write every shard's piece at [layer, row] of its part of `arrays`, which are donated. Numbers without scales are
    quantised first."""
    are_columns_split = len(piece_spec) > 1

    def write_shard(
        arrays: Fp8Arrays, piece: jax.Array, scales: jax.Array | None, layer: jax.Array, row: jax.Array
    ) -> Fp8Arrays:
        if scales is None:
            piece, scales = quantise_rows(piece, TENSOR if are_columns_split else None)
        return Fp8Arrays(
            jax.lax.dynamic_update_slice(arrays.codes, piece[None], (layer, row, 0)),
            jax.lax.dynamic_update_slice(arrays.scales, scales[None], (layer, row)),
        )

    arrays_spec: Any = Fp8Arrays(array_spec, scale_spec)  # type: ignore[arg-type]
    specs = (arrays_spec, piece_spec, None if scales is None else P(*piece_spec[:1]), P(), P())
    return jax.shard_map(write_shard, mesh=mesh, in_specs=specs, out_specs=arrays_spec)(
        arrays, piece, scales, layer, row
    )
