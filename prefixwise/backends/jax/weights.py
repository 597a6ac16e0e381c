"""Weights on the mesh: allocated once in their final place and dtype, then filled piece by piece from the checkpoint.

Layers are stacked along a leading axis, so that one compiled layer runs over all of them. Along the `tensor` axis every
shard holds an array of the same shape, padded with zeros; a shard's Q, K and V are one matrix, its gate and up another.
`weight_loader` reads and places them. In FP8 the matrices of the layers are codes with a scale per row (`fp8_loader`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from prefixwise.backends.jax.fp8 import FP8
from prefixwise.backends.jax.fp8_loader import Fp8Loader
from prefixwise.backends.jax.mesh import TENSOR, P
from prefixwise.backends.jax.placement import HeadPlacement, ShardIndex
from prefixwise.backends.jax.weight_loader import WeightLoader
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.fp8 import up_factor, value_factor
from prefixwise.models.checkpoint import Checkpoint, StoredTensor
from prefixwise.models.config import ModelConfig


class Fp8Scales(NamedTuple):
    """Of the rows out of the layers' matrices in FP8, float32: a weight is its code times the scale of its row. Where
    static scales are folded into them (`forward/fp8.py`), V and up are that times a power of two, O and down divided by
    it."""

    qkv: jax.Array  # [Ly, tp (Kl Gl + 2 Kl) H]
    o: jax.Array  # [Ly, D]
    gate_up: jax.Array  # [Ly, tp 2 Fl]
    down: jax.Array  # [Ly, D]


class LayerWeights(NamedTuple):
    """The decoder layers, `Ly` of them. Matrices are [rows out, columns in].

    `Kl` KV heads and `Gl` query heads for each of them per shard (see `placement`), `Fl` = F / tp, rounded up.
    """

    attention_norm: jax.Array | None  # [Ly, D]; norms may be float32 where the other weights are not
    qkv: jax.Array  # [Ly, tp (Kl Gl + 2 Kl) H, D]: of each shard its query heads [Kl, Gl], its keys, its values
    qkv_bias: jax.Array | None  # [Ly, tp (Kl Gl + 2 Kl) H]; in FP8 V's is scaled as V is
    q_norm: jax.Array | None  # [Ly, H]; a norm of all heads together: [Ly, tp Kl Gl H]
    k_norm: jax.Array | None  # [Ly, H]; a norm of all heads together: [Ly, tp Kl H]
    o: jax.Array  # [Ly, D, tp Kl Gl H]
    mlp_norm: jax.Array | None  # [Ly, D]
    gate_up: jax.Array  # [Ly, tp 2 Fl, D]: of each shard its gate rows, then its up rows; experts: [Ly, tp E 2 Fl, D]
    down: jax.Array  # [Ly, D, tp Fl]; experts: [Ly, E D, tp Fl]
    post_attention_norm: jax.Array | None = None  # [Ly, D]
    post_mlp_norm: jax.Array | None = None  # [Ly, D]
    router: jax.Array | None = None  # [Ly, E, D] float32; None: the layers have no experts
    fp8_scales: Fp8Scales | None = None  # None: the matrices are no codes


class ModelWeights(NamedTuple):
    """The whole model; `head` is `embedding` itself when they are tied. `Vp` is V, padded to a multiple of tp.

    A classifier's head has its few rows in float32, padded to a multiple of tp in the same way.
    """

    embedding: jax.Array  # [Vp, D]
    layers: LayerWeights
    final_norm: jax.Array  # [D]
    head: jax.Array  # [Vp, D]


def weight_specs(config: ModelConfig, *, is_fp8: bool = False) -> ModelWeights:
    """The same tree with a PartitionSpec for every array: how the weights are split over the mesh."""
    whole: Any = P()
    rows: Any = P(None, TENSOR)
    columns: Any = P(None, None, TENSOR)
    vocabulary: Any = P(TENSOR)
    head_norm: Any = rows if config.whole_qk_norm else whole
    layers = LayerWeights(
        attention_norm=whole if config.pre_norms else None,
        qkv=rows,
        qkv_bias=rows if config.qkv_bias else None,
        q_norm=head_norm if config.qk_norm else None,
        k_norm=head_norm if config.qk_norm else None,
        o=columns,
        mlp_norm=whole if config.pre_norms else None,
        gate_up=rows,
        down=columns,
        post_attention_norm=whole if config.post_norms else None,
        post_mlp_norm=whole if config.post_norms else None,
        router=None if config.experts is None else whole,
        fp8_scales=Fp8Scales(qkv=rows, o=whole, gate_up=rows, down=whole) if is_fp8 else None,
    )
    return ModelWeights(embedding=vocabulary, layers=layers, final_norm=whole, head=vocabulary)


def weight_shapes(
    config: ModelConfig, dtype: DTypeLike, mesh: Mesh, placement: HeadPlacement, *, is_fp8: bool = False
) -> ModelWeights:
    """Shapes, dtypes and shardings of what `load_weights` returns."""
    index = ShardIndex.of(config, placement)
    norm = jnp.float32 if config.float32_norms else dtype
    layers, model, head_size = config.num_layers, config.model_size, config.head_size
    specs = weight_specs(config, is_fp8=is_fp8)
    matrix, mlp = (FP8, FP8) if is_fp8 else (dtype, expert_dtype(config, dtype, mesh))
    num_experts = 1 if config.experts is None else config.experts.num_experts

    def shape(spec: Any, dtype: DTypeLike, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    def layer(name: str, dtype: DTypeLike, *sizes: int) -> Any:
        spec = getattr(specs.layers, name)
        return None if spec is None else shape(spec, dtype, layers, *sizes)

    def scales(name: str, size: int) -> Any:
        return shape(getattr(specs.layers.fp8_scales, name), jnp.float32, layers, size)

    embedding = shape(specs.embedding, dtype, index.vocab.size, model)
    head = shape(specs.head, jnp.float32 if config.num_classes else dtype, index.head.size, model)
    return ModelWeights(
        embedding=embedding,
        layers=LayerWeights(
            attention_norm=layer("attention_norm", norm, model),
            qkv=layer("qkv", matrix, index.qkv.size, model),
            qkv_bias=layer("qkv_bias", dtype, index.qkv.size),
            q_norm=layer("q_norm", norm, index.q.size if config.whole_qk_norm else head_size),
            k_norm=layer("k_norm", norm, index.kv.size if config.whole_qk_norm else head_size),
            o=layer("o", matrix, model, index.q.size),
            mlp_norm=layer("mlp_norm", norm, model),
            gate_up=layer("gate_up", mlp, index.gate_up.size, model),
            down=layer("down", mlp, num_experts * model, index.mlp.size),
            post_attention_norm=layer("post_attention_norm", norm, model),
            post_mlp_norm=layer("post_mlp_norm", norm, model),
            router=layer("router", jnp.float32, num_experts, model),
            fp8_scales=Fp8Scales(
                qkv=scales("qkv", index.qkv.size),
                o=scales("o", model),
                gate_up=scales("gate_up", index.gate_up.size),
                down=scales("down", model),
            )
            if is_fp8
            else None,
        ),
        final_norm=shape(specs.final_norm, norm, model),
        head=embedding if config.tied_head else head,
    )


def load_weights(
    checkpoint: Checkpoint,
    dtype: DTypeLike,
    mesh: Mesh,
    placement: HeadPlacement,
    *,
    is_fp8: bool = False,
    is_host_memory: bool | None = None,
) -> ModelWeights:
    """Read all weights; the checkpoint does not stay in memory. Each process reads what its devices hold.

    `is_fp8`: the matrices of the layers in FP8, the rest in `dtype`.
    `is_host_memory`: may the arrays live in memory of this process? None: yes on CPUs.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    loader = WeightLoader(jnp.dtype(dtype), mesh, is_host_memory=is_host_memory)
    wide = WeightLoader(jnp.dtype(jnp.float32), mesh, is_host_memory=is_host_memory)
    as_bits = expert_dtype(config, dtype, mesh) == jnp.uint16
    experts = WeightLoader(jnp.dtype(dtype), mesh, is_host_memory=is_host_memory, as_bits=as_bits)
    norms, heads = wide if config.float32_norms else loader, wide if config.num_classes else loader
    index = ShardIndex.of(config, placement)
    embedding = loader.table(tensors["embedding"], index.vocab)
    fp8 = Fp8Loader(mesh) if is_fp8 else None
    layers = _load_layers(_Loaders(loader, norms, wide, experts, fp8), config, tensors, index)
    return ModelWeights(
        embedding=embedding,
        layers=_fold_static_scales(layers, config, index, mesh) if is_fp8 and config.pre_norms else layers,
        final_norm=norms.vector(tensors["final_norm"]),
        head=embedding if config.tied_head else heads.table(tensors["head"], index.head),
    )


class _Loaders(NamedTuple):
    """Of matrices, of norms, of what is always float32, of the MLP or its experts, and of matrices in FP8."""

    matrices: WeightLoader
    norms: WeightLoader
    wide: WeightLoader
    mlp: WeightLoader
    fp8: Fp8Loader | None  # None: no matrix is in FP8


def expert_dtype(config: ModelConfig, dtype: DTypeLike, mesh: Mesh) -> DTypeLike:
    """How the matrices of MLP or experts are stored. A loop reads one expert after the other: to do that in bfloat16,
    XLA on a CPU would convert all of them to float32 in every forward, so there the loop reads the numbers' bits."""
    is_cpu = all(device.platform == "cpu" for device in mesh.devices.flat)
    return jnp.uint16 if config.experts is not None and is_cpu and jnp.dtype(dtype) == jnp.bfloat16 else dtype


def _load_layers(
    loaders: _Loaders, config: ModelConfig, tensors: Mapping[str, StoredTensor], index: ShardIndex
) -> LayerWeights:
    loader, norms = loaders.matrices, loaders.norms

    def each(name: str) -> list[StoredTensor]:
        return [tensors[f"layers.{layer}.{name}"] for layer in range(config.num_layers)]

    def together(*names: str) -> list[tuple[StoredTensor, ...]]:
        return list(zip(*(each(name) for name in names), strict=True))

    def head_norm(name: str, rows: Int64Array) -> jax.Array | None:
        if not config.qk_norm:
            return None
        return norms.split_vectors(together(name), rows) if config.whole_qk_norm else norms.vectors(each(name))

    scales: dict[str, jax.Array] = {}

    def rows(matrix: str, loader: WeightLoader, names: Sequence[str], index: Int64Array) -> jax.Array:
        if loaders.fp8 is None:
            return loader.split_rows(together(*names), index)
        codes, scales[matrix] = loaders.fp8.split_rows(together(*names), index)
        return codes

    def columns(matrix: str, loader: WeightLoader, index: Int64Array) -> jax.Array:
        if loaders.fp8 is None:
            return loader.split_columns(each(matrix), index)
        codes, scales[matrix] = loaders.fp8.split_columns(each(matrix), index)
        return codes

    layers = LayerWeights(
        attention_norm=norms.vectors(each("attention_norm")) if config.pre_norms else None,
        qkv=rows("qkv", loader, ("q", "k", "v"), index.qkv),
        qkv_bias=loader.split_vectors(together("q_bias", "k_bias", "v_bias"), index.qkv) if config.qkv_bias else None,
        q_norm=head_norm("q_norm", index.q),
        k_norm=head_norm("k_norm", index.kv),
        o=columns("o", loader, index.q),
        mlp_norm=norms.vectors(each("mlp_norm")) if config.pre_norms else None,
        gate_up=rows("gate_up", loaders.mlp, ("gate", "up"), index.gate_up),
        down=columns("down", loaders.mlp, index.mlp),
        post_attention_norm=norms.vectors(each("post_attention_norm")) if config.post_norms else None,
        post_mlp_norm=norms.vectors(each("post_mlp_norm")) if config.post_norms else None,
        router=None if config.experts is None else loaders.wide.vectors(each("router")),
    )
    return layers._replace(fp8_scales=Fp8Scales(**scales)) if scales else layers


def _fold_static_scales(layers: LayerWeights, config: ModelConfig, index: ShardIndex, mesh: Mesh) -> LayerWeights:
    """Fold that of attention's output in FP8 into V and O, and that of the MLP's activations into up and down
    (`forward/fp8.py`)."""
    of_values = index.qkv.reshape(-1) >= (config.num_heads + config.num_kv_heads) * config.head_size
    of_up = index.gate_up.reshape(-1) >= config.mlp_size
    assert layers.fp8_scales is not None

    def square_norms(matrix: jax.Array, scales: jax.Array, norm: jax.Array | None) -> jax.Array:
        assert norm is not None
        weights = matrix.astype(jnp.float32) * norm.astype(jnp.float32)
        return jnp.sum(weights * weights, axis=1) * scales * scales

    def measure(layer: LayerWeights) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A bound of values, and root mean squares of the norms of gate's rows and of up's."""
        scales, bias = layer.fp8_scales, layer.qkv_bias
        assert scales is not None
        of_rows = jnp.sqrt(config.model_size * square_norms(layer.qkv, scales.qkv, layer.attention_norm))
        if bias is not None:
            of_rows += jnp.abs(bias.astype(jnp.float32))
        squares = square_norms(layer.gate_up, scales.gate_up, layer.mlp_norm)
        gate, up = (jnp.sqrt(jnp.sum(jnp.where(rows, squares, 0)) / config.mlp_size) for rows in (~of_up, of_up))
        return jnp.max(jnp.where(of_values, of_rows, 0)), gate, up

    # One layer after the other: in float32 all would take four times the memory of their codes.
    measured = jax.jit(partial(jax.lax.map, measure), out_shardings=NamedSharding(mesh, P()))(layers)
    bounds, gates, ups = (np.asarray(each).tolist() for each in measured)
    values = np.array([value_factor(each) for each in bounds], np.float32)[:, None]
    activations = np.array([up_factor(*each) for each in zip(gates, ups, strict=True)], np.float32)[:, None]

    def fold(scales: Fp8Scales, bias: jax.Array | None) -> tuple[Fp8Scales, jax.Array | None]:
        of_rows = jnp.where(of_values, values, 1)
        folded = Fp8Scales(
            qkv=scales.qkv * of_rows,
            o=scales.o / values,
            gate_up=scales.gate_up * jnp.where(of_up, activations, 1),
            down=scales.down / activations,
        )
        return folded, None if bias is None else bias * of_rows.astype(bias.dtype)

    given = layers.fp8_scales, layers.qkv_bias
    scales, bias = jax.jit(fold, out_shardings=jax.tree.map(lambda array: array.sharding, given))(*given)
    return layers._replace(fp8_scales=scales, qkv_bias=bias)
