from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from prefixwise.backends.jax import weight_loader
from prefixwise.backends.jax.mesh import P, make_mesh, put_replicated
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.weights import LayerWeights, ModelWeights, load_weights, weight_shapes, weight_specs
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.config import ModelConfig, parameter_shapes
from prefixwise.models.families import HF_TENSOR_NAMES, stored_name
from prefixwise.models.sources import open_checkpoint
from tests.checkpoints import make_classifier, make_gguf, make_hf_checkpoint, read_hf_tensors
from tests.peak_memory import growth_of
from tests.quantised_checkpoints import make_awq
from tests.test_memory import write_sparse_checkpoint

# Where nothing divides: heads, MLP and vocabulary are padded at every TP size above 1, at some by whole shards.
ODD_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "intermediate_size": 83,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),  # norms of heads, tied head
    "qwen2": ("qwen2", {}),  # biases
    "llama3": ("llama3", {}),  # a head of its own
    "odd": ("qwen3", ODD_SIZES),
    "gemma": ("gemma", {}),  # norms that are stored less one
    "one_kv_head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
}
WIDE = ("gemma", "classifier")  # which keep something in float32
# Models that are written in place every day, each shape by a program of its own: biases, and all that is padded.
EVERYDAY_IN_PLACE = (("qwen2", 1), ("odd", 4))

Tensors = dict[str, NDArray[Any]]  # by canonical name


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    if test != "test_writing_in_place_makes_the_same_weights":
        return False
    return (parameters["case"], parameters["tp_size"]) not in EVERYDAY_IN_PLACE


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            folder = tmp_path_factory.mktemp("weights") / case
            if case == "classifier":
                rows = np.random.default_rng(0).standard_normal((2, 64), np.float32)
                made[case] = make_classifier(folder, get("qwen3"), rows)
            else:
                family, overrides = CASES[case]
                made[case] = make_hf_checkpoint(folder, family, **overrides)
        return made[case]

    return get


@pytest.fixture(params=["host", "donated"])
def way(request: pytest.FixtureRequest) -> str:
    """Into the process's own memory, as on a CPU, or piece by piece into the device's, as elsewhere."""
    return str(request.param)


def read_tensors(folder: Path, config: ModelConfig) -> Tensors:
    stored = read_hf_tensors(folder)
    names = HF_TENSOR_NAMES | ({"head": "score.weight"} if config.num_classes else {})
    tensors = {name: stored[stored_name(name, names, "model.layers")] for name in parameter_shapes(config)}
    if config.float32_norms:
        return {name: 1 + values if name.endswith("norm") else values for name, values in tensors.items()}
    return tensors


def mesh_of(dp_size: int, tp_size: int) -> Mesh:
    return make_mesh(jax.devices("cpu"), dp_size, tp_size)


def load(checkpoint: Checkpoint, dtype: str, mesh: Mesh, way: str = "host") -> ModelWeights:
    config = checkpoint.config
    placement = HeadPlacement.plan(config.num_heads, config.num_kv_heads, mesh.devices.shape[1])
    return load_weights(checkpoint, dtype, mesh, placement, is_host_memory=way == "host")


@pytest.mark.parametrize("case", [*CASES, "classifier"])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_the_shapes_are_known_without_the_weights(folder_of: Callable[[str], Path], case: str, tp_size: int) -> None:
    checkpoint, mesh = open_checkpoint(folder_of(case)), mesh_of(2, tp_size)
    config = checkpoint.config
    placement = HeadPlacement.plan(config.num_heads, config.num_kv_heads, tp_size)
    loaded = load(checkpoint, "bfloat16", mesh)
    described = weight_shapes(config, "bfloat16", mesh, placement)
    for expected, got in zip(jax.tree.leaves(loaded), jax.tree.leaves(described), strict=True):  # fields in order
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert got.sharding.is_equivalent_to(expected.sharding, expected.ndim)


def heads_of(matrix: NDArray[Any], heads: Sequence[int], head_size: int) -> NDArray[Any]:
    """The rows of these heads, zeros for -1."""
    zeros = np.zeros_like(matrix[:head_size])
    return np.concatenate([zeros if head < 0 else matrix[head * head_size :][:head_size] for head in heads])


def part_of(matrix: NDArray[Any], shard: int, tp_size: int) -> NDArray[Any]:
    """The shard's share of the rows, zeros after the last."""
    share = -(-len(matrix) // tp_size)
    rows = matrix[shard * share :][:share]
    return np.concatenate([rows, np.zeros((share - len(rows), *matrix.shape[1:]), matrix.dtype)])


def expected_weights(tensors: Tensors, config: ModelConfig, placement: HeadPlacement) -> ModelWeights:
    """Said once more, the slow way: shard after shard, head after head."""
    tp_size, h = placement.tp_size, config.head_size

    def split(matrix: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([part_of(matrix, shard, tp_size) for shard in range(tp_size)])

    def qkv(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
        blocks = []
        for q_heads, kv_heads in zip(placement.q_heads, placement.kv_heads, strict=True):
            blocks += [heads_of(q, q_heads.flatten(), h), heads_of(k, kv_heads, h), heads_of(v, kv_heads, h)]
        return np.concatenate(blocks)

    def gate_up(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([part_of(each, shard, tp_size) for shard in range(tp_size) for each in (gate, up)])

    def stack(build: Callable[..., NDArray[Any]], *names: str) -> Any:
        layers = range(config.num_layers)
        return np.stack([build(*(tensors[f"layers.{layer}.{name}"] for name in names)) for layer in layers])

    layers = LayerWeights(
        attention_norm=stack(np.array, "attention_norm"),
        qkv=stack(qkv, "q", "k", "v"),
        qkv_bias=stack(qkv, "q_bias", "k_bias", "v_bias") if config.qkv_bias else None,
        q_norm=stack(np.array, "q_norm") if config.qk_norm else None,
        k_norm=stack(np.array, "k_norm") if config.qk_norm else None,
        o=stack(lambda o: heads_of(o.T, placement.q_heads.flatten().tolist(), h).T, "o"),
        mlp_norm=stack(np.array, "mlp_norm"),
        gate_up=stack(gate_up, "gate", "up"),
        down=stack(lambda down: split(down.T).T, "down"),
    )
    embedding: Any = split(tensors["embedding"])
    final_norm: Any = tensors["final_norm"]
    head: Any = embedding if config.tied_head else split(tensors["head"])
    return ModelWeights(embedding, layers, final_norm, head)


def assert_same(weights: ModelWeights, expected: ModelWeights, dtype: Any) -> None:
    found = dict(jax.tree.leaves_with_path(weights))
    assert found.keys() == dict(jax.tree.leaves_with_path(expected)).keys()
    for path, values in jax.tree.leaves_with_path(expected):
        name = jax.tree_util.keystr(path)
        assert found[path].dtype == dtype, name
        assert found[path].shape == values.shape, name
        assert np.array_equal(np.asarray(found[path]), values.astype(dtype)), name


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", [*CASES, "classifier"])
def test_every_weight_is_where_it_belongs(folder_of: Callable[[str], Path], case: str, tp_size: int) -> None:
    checkpoint = open_checkpoint(folder_of(case))
    config = checkpoint.config
    placement = HeadPlacement.plan(config.num_heads, config.num_kv_heads, tp_size)
    expected = expected_weights(read_tensors(folder_of(case), config), config, placement)
    weights = load(checkpoint, "float32", mesh_of(1, tp_size))
    assert_same(weights, expected, np.float32)
    assert (weights.head is weights.embedding) == config.tied_head


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("case", ["qwen2", "odd"])
def test_writing_in_place_makes_the_same_weights(folder_of: Callable[[str], Path], case: str, tp_size: int) -> None:
    checkpoint = open_checkpoint(folder_of(case))
    expected = load(checkpoint, "bfloat16", mesh_of(1, tp_size), "host")
    weights = load(checkpoint, "bfloat16", mesh_of(1, tp_size), "donated")
    assert_same(weights, expected, ml_dtypes.bfloat16)
    assert (weights.head is weights.embedding) == checkpoint.config.tied_head


def test_what_a_model_wants_in_float32_stays_so(folder_of: Callable[[str], Path], way: str) -> None:
    gemma, classifier = (load(open_checkpoint(folder_of(case)), "bfloat16", mesh_of(1, 4), way) for case in WIDE)
    for weights in (gemma, classifier):
        assert weights.embedding.dtype == weights.layers.qkv.dtype == ml_dtypes.bfloat16
    norm = read_hf_tensors(folder_of("gemma"))["model.norm.weight"]
    assert np.array_equal(gemma.final_norm, np.float32(1) + norm)
    for each in (gemma.layers.attention_norm, gemma.layers.mlp_norm):
        assert each is not None and each.dtype.name == "float32"
    rows = read_hf_tensors(folder_of("classifier"))["score.weight"]
    assert np.array_equal(classifier.head, np.concatenate([rows, np.zeros_like(rows)])), "two shards have one row each"


def test_one_shard_holds_the_tensors_as_they_are(folder_of: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folder_of("odd"))
    tensors = read_tensors(folder_of("odd"), checkpoint.config)
    weights = load(checkpoint, "float32", mesh_of(1, 1))
    q, k, v, gate, up = (tensors[f"layers.1.{name}"] for name in ("q", "k", "v", "gate", "up"))
    assert np.array_equal(weights.layers.qkv[1], np.concatenate([q, k, v]))
    assert np.array_equal(weights.layers.gate_up[1], np.concatenate([gate, up]))
    assert np.array_equal(weights.layers.o[1], tensors["layers.1.o"])
    assert np.array_equal(weights.layers.down[1], tensors["layers.1.down"])
    assert np.array_equal(weights.embedding, tensors["embedding"])
    assert np.array_equal(weights.head, tensors["head"])


@pytest.mark.parametrize("piece_bytes", [1, 1000])
def test_pieces_of_any_size_make_the_same_weights(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, piece_bytes: int, way: str
) -> None:
    checkpoint = open_checkpoint(folder_of("odd"))
    whole = load(checkpoint, "float32", mesh_of(1, 2), "host")
    monkeypatch.setattr(weight_loader, "PIECE_BYTES", piece_bytes)
    for pieced, expected in zip(
        jax.tree.leaves(load(checkpoint, "float32", mesh_of(1, 2), way)), jax.tree.leaves(whole), strict=True
    ):
        assert np.array_equal(pieced, expected)


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
    def test_every_dtype_is_read_as_every_other(
        self, folder_of: Callable[[str], Path], tmp_path: Path, stored: str, dtype: str
    ) -> None:
        """From GGUF files: they know all three, and store the rows of Llama's Q and K in another order."""
        folder = folder_of("one_kv_head")
        checkpoint = open_checkpoint(make_gguf(folder, tmp_path / "model.gguf", stored))
        config = checkpoint.config
        rounded = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}[stored]
        tensors = {
            name: values.astype(rounded) if values.ndim > 1 else values
            for name, values in read_tensors(folder, config).items()
        }
        expected = expected_weights(tensors, config, HeadPlacement.plan(8, 1, 4))
        assert_same(load(checkpoint, dtype, mesh_of(1, 4)), expected, np.dtype(dtype))

    def test_quantised_rows(self, folder_of: Callable[[str], Path], tmp_path: Path, way: str) -> None:
        checkpoint = open_checkpoint(make_gguf(folder_of("llama3"), tmp_path / "model.gguf", "Q8_0"))
        tensors = {name: tensor.read_rows(0, tensor.shape[0]) for name, tensor in checkpoint.tensors.items()}
        expected = expected_weights(tensors, checkpoint.config, HeadPlacement.plan(4, 2, 2))
        assert_same(load(checkpoint, "bfloat16", mesh_of(1, 2), way), expected, ml_dtypes.bfloat16)

    def test_packed_rows(self, folder_of: Callable[[str], Path], tmp_path: Path, way: str) -> None:
        """Of a folder that is stored transposed, several rows in a word."""
        checkpoint = open_checkpoint(make_awq(folder_of("llama3"), tmp_path / "awq")[0])
        tensors = {name: tensor.read_rows(0, tensor.shape[0]) for name, tensor in checkpoint.tensors.items()}
        expected = expected_weights(tensors, checkpoint.config, HeadPlacement.plan(4, 2, 2))
        assert_same(load(checkpoint, "bfloat16", mesh_of(1, 2), way), expected, ml_dtypes.bfloat16)


class TestSharding:
    @pytest.mark.parametrize("case", ["qwen2", "odd"])
    def test_weights_lie_as_their_specs_say(self, folder_of: Callable[[str], Path], case: str, way: str) -> None:
        mesh = mesh_of(2, 4)
        checkpoint = open_checkpoint(folder_of(case))
        weights, specs = load(checkpoint, "float32", mesh, way), weight_specs(checkpoint.config)
        arrays = dict(jax.tree.leaves_with_path(weights))
        assert arrays.keys() == dict(jax.tree.leaves_with_path(specs)).keys()
        for array, spec in zip(arrays.values(), jax.tree.leaves(specs), strict=True):
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
            assert len(array.addressable_shards) == 8
            shard_size = array.size if spec == P() else array.size // 4
            for shard in array.addressable_shards:
                assert shard.data.size == shard_size
                assert np.array_equal(shard.data, np.asarray(array)[shard.index])

    def test_the_specs_serve_shard_map(self, folder_of: Callable[[str], Path]) -> None:
        mesh = mesh_of(1, 4)
        checkpoint = open_checkpoint(folder_of("qwen3"))
        shapes: list[tuple[int, ...]] = []

        def look(weights: ModelWeights) -> jax.Array:
            shapes.extend([weights.embedding.shape, weights.layers.qkv.shape, weights.layers.down.shape])
            return weights.final_norm

        specs = weight_specs(checkpoint.config)
        jax.shard_map(look, mesh=mesh, in_specs=(specs,), out_specs=P())(load(checkpoint, "float32", mesh))
        # 4 query heads and 2 KV heads of 32 over 4 shards: one of each; an MLP of 96; 512 tokens
        assert shapes == [(128, 64), (2, 3 * 32, 64), (2, 64, 24)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestMemory:
    """A tenth of the model above its size: room for the pieces on their way (8 MiB each, two of them, on the host and
    on the device) and for the programs that write them, 1 to 7 % as measured. No room for a second copy of the
    embedding or of a stacked matrix, 16 to 42 %, O alone excepted (5 %), nor for one layer on either side, 12 %."""

    @pytest.mark.parametrize(
        ("stored", "dtype", "tp_size", "way"),
        [
            pytest.param("F32", "bfloat16", 1, "host", marks=pytest.mark.slow),
            ("BF16", "bfloat16", 4, "host"),
            ("BF16", "float32", 1, "donated"),
            pytest.param("F8_E4M3", "bfloat16", 1, "host", marks=pytest.mark.slow),
        ],
    )
    def test_loading_needs_little_more_than_the_model(
        self, tmp_path: Path, stored: str, dtype: str, tp_size: int, way: str
    ) -> None:
        folder = write_sparse_checkpoint(tmp_path / "large", stored)
        size = np.dtype(dtype).itemsize * open_checkpoint(folder).config.num_parameters
        assert size >= 500e6
        growth = growth_of("load_jax", str(folder), dtype, str(tp_size), way)
        assert 0.95 * size <= growth <= 1.1 * size

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    def test_a_piece_is_written_into_the_memory_that_is_there(self, dtype: Any) -> None:
        mesh = mesh_of(1, 1)
        array = put_replicated(mesh, np.zeros((3, 8, 5), dtype)) + 0  # memory of the device's own
        before, address = array, array.unsafe_buffer_pointer()
        piece = put_replicated(mesh, np.ones((2, 5), dtype))
        array = weight_loader.write_piece(mesh, P(), P(), array, piece, np.int32(1), np.int32(4))
        assert array.unsafe_buffer_pointer() == address
        assert before.is_deleted()
        assert np.asarray(array).sum() == 10
        assert np.asarray(array)[1, 4:6].sum() == 10
