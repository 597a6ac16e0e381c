"""From stored tensors to arrays on the mesh, without a second copy on either side, in pieces of a few megabytes.

On an accelerator an array is allocated once and then written in place, piece by piece: it is donated to the small
program that writes, so it is never copied. Neither the host nor a device ever holds more than the model and two pieces.

On a CPU the device reads host memory: the pieces go straight into the memory of the final array. (Writing in place
works there too, but XLA's CPU programs convert a whole bfloat16 array to float32 to change one row of it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from prefixwise.backends.jax.mesh import TENSOR, P, put_replicated, put_sharded
from prefixwise.backends.jax.placement import fill_columns, fill_sequences, read_numbers
from prefixwise.contract.ragged import Int64Array
from prefixwise.models.checkpoint import StoredTensor

PIECE_BYTES = 8 << 20  # per shard: how much is read, converted and written at a time
_ALIGNMENT = 64  # bytes: jax's CPU devices use host memory of this alignment in place, and copy other memory

FillShard = Callable[[int, NDArray[Any]], None]  # shard, its [rows of the piece, columns of the shard]


@dataclass(frozen=True)
class Plan:
    """An array to load, [rows, columns] or [layers, rows, columns], with rows or columns split over the shards."""

    shape: tuple[int, ...]
    split_axis: int  # 0 for rows, 1 for columns
    num_rows: int  # of every shard
    read: Callable[[int, int, int], FillShard]  # layer, first row, last row + 1

    @property
    def piece_spec(self) -> PartitionSpec:
        return P(TENSOR) if self.split_axis == 0 else P(None, TENSOR)

    @property
    def spec(self) -> PartitionSpec:
        return P(None, *self.piece_spec) if len(self.shape) == 3 else self.piece_spec

    def pieces(self, row_bytes: int) -> tuple[int, Iterator[tuple[int, int]]]:
        """The rows of a piece, and the (layer, first row) of each. All have one shape: the last piece of a layer starts
        earlier instead of being shorter."""
        num_pieces = -(-self.num_rows // max(1, PIECE_BYTES // row_bytes))
        step = -(-self.num_rows // num_pieces)
        num_layers = self.shape[0] if len(self.shape) == 3 else 1
        starts = [min(first, self.num_rows - step) for first in range(0, self.num_rows, step)]
        return step, ((layer, start) for layer in range(num_layers) for start in starts)


class WeightLoader:
    """Makes arrays of one dtype on one mesh. An `index` [tp, n] says which source rows each shard holds."""

    def __init__(
        self, dtype: np.dtype[Any], mesh: Mesh, *, is_host_memory: bool | None = None, as_bits: bool = False
    ) -> None:
        self._dtype = dtype
        self._as_bits = as_bits  # are arrays in host memory the integers of their numbers' bits? (2 bytes each)
        self._mesh = mesh
        is_cpu = all(device.platform == "cpu" for device in mesh.devices.flat)
        self._is_host_memory = is_cpu if is_host_memory is None else is_host_memory

    def vector(self, tensor: StoredTensor) -> jax.Array:
        """[n], whole on every device."""
        return put_replicated(self._mesh, self._whole(tensor))

    def vectors(self, layers: Sequence[StoredTensor]) -> jax.Array:
        """[layers, n] or, of small matrices, [layers, n, columns], whole on every device."""
        return put_replicated(self._mesh, np.stack([self._whole(tensor) for tensor in layers]))

    def split_vectors(self, layers: Sequence[Sequence[StoredTensor]], index: Int64Array) -> jax.Array:
        """[layers, tp x n]: the parts of each layer one after the other, split."""
        stacked = np.empty((len(layers), index.size), self._dtype)
        for target, parts in zip(stacked, layers, strict=True):
            fill_sequences(target, parts, index.reshape(-1))
        return put_sharded(self._mesh, stacked, P(None, TENSOR))

    def split_rows(self, layers: Sequence[Sequence[StoredTensor]], index: Int64Array) -> jax.Array:
        """[layers, tp x n, columns]: the parts of each layer one above the other, their rows split."""
        return self._make(plan_rows(layers, index))

    def split_columns(self, layers: Sequence[StoredTensor], index: Int64Array) -> jax.Array:
        """[layers, rows, tp x n]: one tensor per layer, its columns split."""
        return self._make(plan_columns(layers, index))

    def table(self, tensor: StoredTensor, index: Int64Array) -> jax.Array:
        """[tp x n, columns]: one tensor, its rows split."""
        shape = (index.size, tensor.shape[1])
        return self._make(Plan(shape, 0, index.shape[1], partial(_read_rows, [[tensor]], index)))

    def _whole(self, tensor: StoredTensor) -> NDArray[Any]:
        return np.array(read_numbers(tensor, 0, tensor.shape[0]), self._dtype)

    def _make(self, plan: Plan) -> jax.Array:
        return self._fill_host_memory(plan) if self._is_host_memory else self._write_in_place(plan)

    def _row_bytes(self, plan: Plan) -> int:
        """Bytes of one row of one shard."""
        return self._dtype.itemsize * NamedSharding(self._mesh, plan.spec).shard_shape(plan.shape)[-1]

    def _fill_host_memory(self, plan: Plan) -> jax.Array:
        sharding = NamedSharding(self._mesh, plan.spec)
        shards = Shards.allocate(sharding, plan.shape, len(plan.shape) - 2 + plan.split_axis, self._dtype)
        step, pieces = plan.pieces(self._row_bytes(plan))
        for layer, start in pieces:
            fill = plan.read(layer, start, start + step)
            for shard, part in shards.parts.items():
                rows = part[layer] if part.ndim == 3 else part
                fill(shard, rows[start : start + step])
        return shards.bits().put() if self._as_bits else shards.put()

    def _write_in_place(self, plan: Plan) -> jax.Array:
        array = allocate_zeros(plan.shape, self._dtype, NamedSharding(self._mesh, plan.spec))
        step, pieces = plan.pieces(self._row_bytes(plan))
        num_rows = step * self._mesh.shape[TENSOR] if plan.split_axis == 0 else step
        sharding = NamedSharding(self._mesh, plan.piece_spec)
        for layer, start in pieces:
            fill = plan.read(layer, start, start + step)
            shards = Shards.allocate(sharding, (num_rows, plan.shape[-1]), plan.split_axis, self._dtype)
            for shard, part in shards.parts.items():
                fill(shard, part)
            piece = shards.put()
            array.block_until_ready()  # this piece was read while the previous one was written: never hold a third
            array = write_piece(self._mesh, plan.spec, plan.piece_spec, array, piece, np.int32(layer), np.int32(start))
        return array


@dataclass(frozen=True)
class Shards:
    """This process's part of an array, on the host: one array per shard, even where several devices replicate it."""

    sharding: NamedSharding
    shape: tuple[int, ...]
    axis: int  # the one that is split
    parts: Mapping[int, NDArray[Any]]

    @classmethod
    def allocate(cls, sharding: NamedSharding, shape: tuple[int, ...], axis: int, dtype: np.dtype[Any]) -> Shards:
        part_shape = sharding.shard_shape(shape)
        indices = sharding.addressable_devices_indices_map(shape).values()
        numbers = {_start(index, axis) // part_shape[axis] for index in indices}
        return cls(sharding, shape, axis, {number: _aligned_empty(part_shape, dtype) for number in sorted(numbers)})

    def bits(self) -> Shards:
        return replace(self, parts={number: part.view(np.uint16) for number, part in self.parts.items()})

    def put(self) -> jax.Array:
        part_len = self.sharding.shard_shape(self.shape)[self.axis]
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.parts[_start(index, self.axis) // part_len]
        )


def plan_rows(layers: Sequence[Sequence[StoredTensor]], index: Int64Array) -> Plan:
    """[layers, tp x n, columns]: the parts of each layer one above the other, their rows split."""
    shape = (len(layers), index.size, layers[0][0].shape[1])
    return Plan(shape, 0, index.shape[1], partial(_read_rows, layers, index))


def plan_columns(layers: Sequence[StoredTensor], index: Int64Array) -> Plan:
    """[layers, rows, tp x n]: one tensor per layer, its columns split."""
    shape = (len(layers), layers[0].shape[0], index.size)
    return Plan(shape, 1, shape[1], partial(_read_columns, layers, index))


def _start(index: tuple[slice, ...] | None, axis: int) -> int:
    return 0 if index is None else index[axis].start or 0


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    num_bytes = dtype.itemsize * int(np.prod(shape))
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _read_rows(
    layers: Sequence[Sequence[StoredTensor]], index: Int64Array, layer: int, start: int, stop: int
) -> FillShard:
    return lambda shard, target: fill_sequences(target, layers[layer], index[shard, start:stop])


def _read_columns(layers: Sequence[StoredTensor], index: Int64Array, layer: int, start: int, stop: int) -> FillShard:
    rows = read_numbers(layers[layer], start, stop)  # once for all shards: reading quantised rows is slow
    return lambda shard, target: fill_columns(target, rows, index[shard])


def allocate_zeros(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: NamedSharding) -> jax.Array:
    """An array to be written piece by piece."""
    array: jax.Array = jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    return array


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def write_piece(
    mesh: Mesh,
    array_spec: PartitionSpec,
    piece_spec: PartitionSpec,
    array: jax.Array,
    piece: jax.Array,
    layer: jax.Array,
    row: jax.Array,
) -> jax.Array:
    """Write every shard's piece at [layer, row] of its part of `array`, which is donated."""

    def write_shard(array: jax.Array, piece: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
        if array.ndim == 2:
            return jax.lax.dynamic_update_slice(array, piece, (row, 0))
        return jax.lax.dynamic_update_slice(array, piece[None], (layer, row, 0))

    specs = (array_spec, piece_spec, P(), P())
    return jax.shard_map(write_shard, mesh=mesh, in_specs=specs, out_specs=array_spec)(array, piece, layer, row)
