"""The compiled programs of a model: which there are, and how each is called.

trunk         tokens to hidden states, one program per `ProgramSpec`
labels        hidden states to the logits of LABEL_BLOCK labels, one per number of tokens
normalizers   hidden states to log-sum-exps over the vocabulary, one per number of tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from itemwise.backends.jax import head
from itemwise.backends.jax.attention import xla
from itemwise.backends.jax.inputs import ForwardInputs, ProgramSpec, capacities, unpack
from itemwise.backends.jax.mesh import DATA, P
from itemwise.backends.jax.model import Transformer
from itemwise.backends.jax.pool import POOL_SPEC, PoolArrays
from itemwise.backends.jax.weights import ModelWeights, weight_specs
from itemwise.backends.layout.tiles import TileSizes

# XLA's own Triton products may split a sum between blocks, in a way that depends on the number of rows.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}

HIDDEN_SPEC = P(DATA)


@dataclass(frozen=True, eq=False)
class Programs:
    """Makes programs and remembers them; jax compiles each when it is first called."""

    mesh: Mesh
    transformer: Transformer
    max_pool_blocks: int
    platform: str
    _trunks: dict[ProgramSpec, Callable[..., Any]] = field(default_factory=dict)
    _heads: set[tuple[str, int]] = field(default_factory=set)  # kind and number of hidden states

    @property
    def num_compiled(self) -> int:
        return len(self._trunks) + len(self._heads)

    def tile_sizes(self, spec: ProgramSpec) -> TileSizes:
        """As the attention of these programs wants them; a dense mask is read by XLA, whatever the others have."""
        if spec.dense_columns:
            return xla.SIZES
        return self.transformer.attention.tile_sizes(self.transformer.heads_per_kv)

    def input_lens(self, spec: ProgramSpec) -> ForwardInputs[int]:
        return capacities(spec, self.tile_sizes(spec), self.max_pool_blocks)

    def trunk(self, spec: ProgramSpec) -> Callable[..., tuple[jax.Array | None, PoolArrays]]:
        """weights, pool (which is consumed), packed inputs [dp, ..], dense mask or None."""
        if spec not in self._trunks:
            self._trunks[spec] = self._compile_trunk(spec)
        return self._trunks[spec]

    def _compile_trunk(self, spec: ProgramSpec) -> Callable[..., Any]:
        lens = self.input_lens(spec)

        def trunk(weights: ModelWeights, pool: PoolArrays, packed: jax.Array, mask: jax.Array | None) -> Any:
            return self.transformer(spec, weights, pool, unpack(packed[0], lens), mask)

        pool_specs: Any = PoolArrays(POOL_SPEC, POOL_SPEC)  # type: ignore[arg-type]
        in_specs = (weight_specs(self.transformer.config), pool_specs, P(DATA), P(DATA) if spec.dense_columns else None)
        out_specs = (HIDDEN_SPEC if spec.scores else None, pool_specs)
        return self._jit(trunk, in_specs, out_specs, donate=(1,))

    def count_head(self, kind: str, hidden: jax.Array) -> None:
        """A program of the head is run; jax compiles one for every number of hidden states."""
        self._heads.add((kind, len(hidden)))

    @cached_property
    def labels(self) -> Callable[..., jax.Array]:
        """head [V, D], hidden [dp T, D], label ids [LABEL_BLOCK], score blocks [dp] to [dp T, LABEL_BLOCK]."""
        transformer = self.transformer
        function = partial(head.label_logits, score_rows=transformer.rows.score_rows, tp_size=transformer.tp_size)

        def labels(weights: jax.Array, hidden: jax.Array, label_ids: jax.Array, num_blocks: jax.Array) -> jax.Array:
            return function(weights, hidden, label_ids, num_blocks[0])

        specs = (weight_specs(transformer.config).head, HIDDEN_SPEC, P(), P(DATA))
        return self._jit(labels, specs, HIDDEN_SPEC)

    @cached_property
    def normalizers(self) -> Callable[..., jax.Array]:
        """head [V, D], hidden [dp T, D], score blocks [dp] to [dp T]."""
        transformer = self.transformer
        function = partial(
            head.log_normalizers,
            score_rows=transformer.rows.score_rows,
            tp_size=transformer.tp_size,
            vocab_size=transformer.config.num_head_rows,
        )

        def normalizers(weights: jax.Array, hidden: jax.Array, num_blocks: jax.Array) -> jax.Array:
            return function(weights, hidden, num_blocks[0])

        return self._jit(normalizers, (weight_specs(transformer.config).head, HIDDEN_SPEC, P(DATA)), HIDDEN_SPEC)

    @cached_property
    def whole(self) -> Callable[..., jax.Array]:
        """An array that is split between processes, whole on every device of each."""
        return jax.jit(lambda array: array, out_shardings=NamedSharding(self.mesh, P()))

    def _jit(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Any:
        sharded = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(sharded, donate_argnums=donate, compiler_options=COMPILER_OPTIONS.get(self.platform))
