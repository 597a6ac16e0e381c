"""LoRA adapters on the devices: the matrices of all slots side by side, and what they add to linear layers.

One GEMM multiplies a row with the A's of all slots. Those of other slots than the row's become zeros, and a second GEMM
with the B's of all slots adds nothing for them. Rows without an adapter keep the bits of a program without LoRA: their
part is not added at all. Slots are data, so loading an adapter compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from prefixwise.backends.jax.mesh import P, put_replicated
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import BackendOptions
from prefixwise.models.config import ModelConfig
from prefixwise.models.lora import MATRICES, LoraAdapter, Matrix, matrix_shape, num_parts

AddLora = Callable[[Matrix, jax.Array, jax.Array], jax.Array]  # x [T, in] and out [T, rows out] to the sum


class LoraPair(NamedTuple):
    """Of one matrix of the layers. `S` slots, each `R` wide: the ranks of all parts of the matrix."""

    a: jax.Array  # [Ly, S R, columns in]
    b: jax.Array  # [Ly, rows out, S R]


class LoraArrays(NamedTuple):
    """Of all matrices of the layers."""

    qkv: LoraPair
    o: LoraPair
    gate_up: LoraPair
    down: LoraPair


def no_lora(matrix: Matrix, x: jax.Array, out: jax.Array) -> jax.Array:
    """Rows without adapters."""
    return out


class Adapters(NamedTuple):
    """The arrays as a program sees them."""

    arrays: LoraArrays
    num_slots: int  # a constant of the program


class LoraRows(NamedTuple):
    """The adapters of some rows."""

    adapters: Adapters
    slots: jax.Array  # [T]


def adding(adapters: Adapters | None, layer: Any, slots: Sequence[jax.Array]) -> AddLora:
    """What adds the adapters' parts to the rows of a layer. `slots`: [T] of these rows, or nothing."""
    if adapters is None or not slots:
        return no_lora

    def add(matrix: Matrix, x: jax.Array, out: jax.Array) -> jax.Array:
        pair: LoraPair = getattr(adapters.arrays, matrix)
        a, b = pair.a[layer], pair.b[layer]
        owner = jnp.arange(len(a)) // (len(a) // adapters.num_slots) + 1
        inner = jnp.where(slots[0][:, None] == owner, _linear(x, a), 0)
        # What comes before and behind is compiled as without LoRA, so that other rows keep their bits.
        out = lax.optimization_barrier(out)
        total = (out.astype(jnp.float32) + _linear(inner, b, jnp.float32)).astype(out.dtype)
        return lax.optimization_barrier(jnp.where(slots[0][:, None] > 0, total, out))

    return add


def _linear(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype)


def check_lora(config: ModelConfig, options: BackendOptions) -> None:
    """Raises BackendError where adapters are asked for and cannot run."""
    if not options.max_loras:
        return
    if config.experts is not None:
        raise BackendError("LoRA adapters are not supported for models with experts (MoE): expected max_loras 0")
    if options.quantization is not None:  # V and O have a scale in them that adapters do not know
        raise BackendError(
            f"LoRA adapters are not supported with quantization {options.quantization}: expected max_loras 0"
        )
    if options.tp_size > 1:
        message = f"LoRA adapters are not supported with tensor parallelism: expected tp_size 1, got {options.tp_size}"
        raise BackendError(f"{message}; max_loras 0 turns them off")


def lora_specs() -> LoraArrays:
    """Every device holds all of them."""
    whole: Any = P()
    return LoraArrays(*[LoraPair(whole, whole)] * len(MATRICES))


def lora_shapes(config: ModelConfig, options: BackendOptions, dtype: DTypeLike, mesh: Mesh) -> LoraArrays | None:
    """Shapes, dtypes and shardings; None: there are no slots."""
    if not options.max_loras:
        return None

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P()))

    pairs = {}
    for matrix in MATRICES:
        rows, columns = matrix_shape(config, matrix)
        width = options.max_loras * num_parts(matrix) * options.max_lora_rank
        pairs[matrix] = LoraPair(
            shape(config.num_layers, width, columns),
            shape(config.num_layers, rows, width),
        )
    return LoraArrays(**pairs)


@dataclass
class LoraStore:
    """The arrays, and the heads of adapters that have their own."""

    mesh: Mesh
    max_loras: int
    max_rank: int
    arrays: LoraArrays
    heads: dict[int, jax.Array] = field(default_factory=dict)  # by slot

    @classmethod
    def of(cls, mesh: Mesh, shapes: LoraArrays, options: BackendOptions) -> LoraStore:
        zeros = jax.tree.map(lambda each: put_replicated(mesh, np.zeros(each.shape, each.dtype)), shapes)
        return cls(mesh, options.max_loras, options.max_lora_rank, zeros)

    def load(self, slot: int, adapter: LoraAdapter, config: ModelConfig, head: jax.Array) -> None:
        """Between forwards. `head`: the model's own, [Vp, D]."""
        pairs = {}
        for matrix in MATRICES:
            old: LoraPair = getattr(self.arrays, matrix)
            (rows, columns), width = matrix_shape(config, matrix), num_parts(matrix) * self.max_rank
            a = np.zeros((config.num_layers, width, columns), np.float32)
            b = np.zeros((config.num_layers, rows, width), np.float32)
            for layer, found in enumerate(adapter.layers):
                if matrix in found:
                    rank = len(found[matrix].a)
                    a[layer, :rank], b[layer, :, :rank] = found[matrix].a, found[matrix].b
            start = np.int32((slot - 1) * width)
            sent = [put_replicated(self.mesh, each.astype(old.a.dtype)) for each in (a, b)]
            pairs[matrix] = LoraPair(_replace(old.a, sent[0], start, axis=1), _replace(old.b, sent[1], start, axis=2))
        self.arrays = LoraArrays(**pairs)
        self.heads.pop(slot, None)
        if adapter.head is not None:
            padded = np.zeros(head.shape, np.float32)
            padded[: len(adapter.head)] = adapter.head
            self.heads[slot] = jax.device_put(padded.astype(head.dtype), head.sharding)


@partial(jax.jit, static_argnames="axis")
def _replace(old: jax.Array, new: jax.Array, start: jax.Array, *, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(old, new, start, axis)
