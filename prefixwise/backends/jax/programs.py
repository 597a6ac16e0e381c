"""The compiled programs of a model, and how each is called.

embed         tokens to embeddings, some of which are overridden; other embeddings are a part of the trunk
trunk         tokens to the last layer's attention, one program per `ProgramSpec`
score         some tokens of a trunk to hidden states, one program per number of tokens
labels        hidden states to the logits of LABEL_TILE labels
logsumexp     hidden states to the logsumexp over the vocabulary
vocabulary    hidden states to the logits of given tokens, logsumexp and top-k tokens; compiled on first use
gather        hidden states of all processes, where there are several, to each of them

All behind the trunk have one tile of `RowTiles.score_rows` rows; more tokens than that are several runs.

A program is traced and compiled from the shapes and shardings of its arguments. Tracing holds Python's lock and
compiling does not, so many programs can be compiled at a time. An earlier start may have left it on disk
(`executables.py`); it is then neither traced nor compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from prefixwise.backends.jax.attention import xla
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.backends.jax.executables import ExecutableStore
from prefixwise.backends.jax.head_gemms import LABEL_TILE, label_logits, logsumexp, score_vocabulary
from prefixwise.backends.jax.inputs import ForwardInputs, ProgramSpec, capacities, packed_size, unpack
from prefixwise.backends.jax.kv_cache import KV_CACHE_SPEC, KVCacheArrays
from prefixwise.backends.jax.lora import Adapters, LoraArrays, lora_specs
from prefixwise.backends.jax.mesh import DATA, TENSOR, P
from prefixwise.backends.jax.model import LastLayer, Transformer
from prefixwise.backends.jax.weights import ModelWeights
from prefixwise.forward.tiles import TileSizes

log = logging.getLogger("prefixwise")

COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # XLA's own Triton GEMMs may split a sum between tiles, in a way that depends on the number of rows. Autotuning
    # chooses GEMM kernels by their times, so perhaps others at every start (`invariant_rows.py`).
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0},
    # Half the compile time of level 3 at the same speed: the GEMMs are library calls (docs/decisions.md).
    "cpu": {"xla_backend_optimization_level": 1},
}

# Where the last programs of a forward put their results. On a GPU they write them to the host: a copy behind a program
# begins only when the runtime has learned that the program has ended.
RESULT_MEMORY = {"gpu": "pinned_host"}

HIDDEN_SPEC = P(DATA)
LAST_SPECS: Any = LastLayer(P(DATA), P(DATA, TENSOR))  # type: ignore[arg-type]


@dataclass(frozen=True)
class EmbedSpec:
    """A program before a trunk, for tokens of which some have overridden embeddings. It is compiled on first use."""

    num_tokens: int  # capacity of one data shard
    num_overrides: int

    @property
    def title(self) -> str:
        return f"embed, {self.num_tokens} tokens, {self.num_overrides} overrides"


@dataclass(frozen=True)
class HeadSpec:
    """A program behind the trunk, for one tile of scored rows."""

    kind: Literal["score", "labels", "logsumexp", "vocabulary", "gather"]
    num_tokens: int | None = None  # `score`: capacity of the trunk's data shard
    top_k: int = 0  # `vocabulary`: how many of the most likely tokens
    has_lora: bool = False  # `score`: some tokens have LoRA adapters

    @property
    def title(self) -> str:
        if self.top_k:
            return f"{self.kind}, top {self.top_k}"
        adapted = ", with LoRA" if self.has_lora else ""
        return self.kind if self.num_tokens is None else f"{self.kind}, {self.num_tokens} tokens{adapted}"


Spec = ProgramSpec | EmbedSpec | HeadSpec


class _Source(NamedTuple):
    """A program before it is traced."""

    jitted: Any
    arguments: tuple[Any, ...]  # shapes and shardings
    outputs: Any  # a tree like that of its outputs


@dataclass(frozen=True, eq=False)
class Programs:
    """Compiles programs and holds them. A program that is not compiled yet is compiled at its first use."""

    mesh: Mesh
    transformer: Transformer
    max_kv_blocks: int
    platform: str
    weights: ModelWeights  # shapes and shardings, as are those of the KV cache
    kv_cache: KVCacheArrays
    lora: LoraArrays | None = None  # shapes and shardings; None: there are no slots for adapters
    num_lora_slots: int = 0
    store: ExecutableStore = field(default_factory=ExecutableStore)
    _unsaved: dict[Spec, Compiled] = field(default_factory=dict)  # compiled, and not in the store
    _compiled: dict[Spec, Compiled] = field(default_factory=dict)
    _loaded: set[Spec] = field(default_factory=set)  # from the store
    _unproven: set[Spec] = field(default_factory=set)  # of these: have not run yet
    _distrusted: set[Spec] = field(default_factory=set)  # did not run, so their files are not read again
    _compiling: set[Spec] = field(default_factory=set)  # at their first use

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    @property
    def num_loaded(self) -> int:
        """How many of them were read from disk."""
        return len(self._loaded)

    @property
    def is_compiling(self) -> bool:
        """A program is compiled for a forward that waits for it."""
        return bool(self._compiling)

    @property
    def weight_specs(self) -> ModelWeights:
        """How the weights are split over the mesh."""
        specs: ModelWeights = jax.tree.map(lambda shape: shape.sharding.spec, self.weights)
        return specs

    def tile_sizes(self, spec: ProgramSpec) -> TileSizes:
        """The tile sizes of the program's attention. A dense mask always runs in XLA."""
        if spec.dense_columns:
            return xla.SIZES
        return self.attention(spec).tile_sizes(self.transformer.heads_per_kv)

    def attention(self, spec: ProgramSpec) -> AttentionImplementation:
        """The implementation of the program's attention, unless its mask is dense."""
        return self.transformer.attention_for(spec)

    def input_lens(self, spec: ProgramSpec) -> ForwardInputs[int]:
        return capacities(spec, self.tile_sizes(spec), self.max_kv_blocks)

    def trunk(self, spec: ProgramSpec) -> Callable[..., tuple[LastLayer, KVCacheArrays]]:
        """weights, KV cache (donated), packed inputs [dp, ..], dense mask or None, embeddings [dp T, D] or None, the
        matrices of LoRA adapters or None."""
        return self._get(spec)

    def embed(self, num_tokens: int, num_overrides: int) -> Callable[..., jax.Array]:
        """embedding [V, D], tokens [dp, T + E], rows [dp, E, D] to [dp T, D]."""
        return self._get(EmbedSpec(num_tokens, num_overrides))

    def score(self, num_tokens: int, *, has_lora: bool = False) -> Callable[..., jax.Array]:
        """weights, the output of a trunk [dp T, ..], tokens [dp, S], the matrices of LoRA adapters or None to hidden
        [dp S, D]. With LoRA: tokens and their slots [dp, 2 S]. Where the mean of a segment is scored: starts and
        lengths of segments [dp, 2 S]."""
        return self._get(HeadSpec("score", num_tokens, has_lora=has_lora))

    @property
    def labels(self) -> Callable[..., jax.Array]:
        """head [V, D], hidden [dp S, D], label ids [LABEL_TILE] to [dp S, LABEL_TILE]."""
        return self._get(HeadSpec("labels"))

    @property
    def logsumexp(self) -> Callable[..., jax.Array]:
        """head [V, D], hidden [dp S, D] to [dp S]."""
        return self._get(HeadSpec("logsumexp"))

    def vocabulary(self, top_k: int) -> Callable[..., jax.Array]:
        """head [V, D], hidden [dp S, D], token ids [dp S] to [dp S, 2 + 2 K]."""
        return self._get(HeadSpec("vocabulary", top_k=top_k))

    def gathered(self, hidden: jax.Array) -> jax.Array:
        """hidden [dp S, D], such that this process can fetch it. Only with several processes that takes a program."""
        if hidden.is_fully_addressable:
            return hidden
        gathered: jax.Array = self._get(HeadSpec("gather"))(hidden)
        return gathered

    def _get(self, spec: Spec) -> Callable[..., Any]:
        if spec not in self._compiled:
            self._compiling.add(spec)
            try:
                self.lower(spec)()
            finally:
                self._compiling.discard(spec)
            self.save()
        return partial(self._run_unproven, spec) if spec in self._unproven else self._compiled[spec]

    def _run_unproven(self, spec: Spec, *arguments: Any) -> Any:
        try:
            return self._compiled[spec](*arguments)
        except Exception as error:  # of jax, and of many types
            if not self.recompile(spec):
                raise
            log.warning("the program %r, read from disk, does not run, and was compiled again: %s", spec.title, error)
            return self._compiled[spec](*arguments)

    def lower(self, spec: Spec) -> Callable[[], None]:
        """Trace a program. The returned function compiles it, on any thread; it does nothing for a compiled program,
        and reads one that is on disk."""
        if spec in self._compiled:
            return lambda: None
        if spec not in self._distrusted and self.store.has(self._describe(spec)):
            return partial(self._load, spec)
        return partial(self._compile, spec, self.lowered(spec))

    def _compile(self, spec: Spec, lowered: Lowered) -> None:
        self._compiled[spec] = self._unsaved[spec] = lowered.compile()

    def _load(self, spec: Spec) -> None:
        """From the store. A program that cannot be read is traced and compiled on this thread."""
        source = self._source(spec)
        stored = self.store.load(self._describe(spec), source.arguments, source.outputs)
        if stored is None:
            self._compile(spec, self.lowered(spec))
        else:
            self._compiled[spec] = stored
            self._loaded.add(spec)
            self._unproven.add(spec)

    def trust(self, spec: Spec | None = None) -> None:
        """The program, or every one, has run. Any thread may call this."""
        if spec is None:
            self._unproven.clear()
        self._unproven.discard(spec)

    def distrust(self) -> None:
        """A forward has failed: what was read from disk and has not run yet is compiled at its next use."""
        for spec in self._unproven.copy():
            log.warning("the program %r, read from disk, is compiled again: a forward with it has failed", spec.title)
            self._distrusted.add(spec)
            self._unproven.discard(spec)
            self._loaded.discard(spec)
            del self._compiled[spec]

    def recompile(self, spec: Spec) -> bool:
        """Compile a program that was read from disk and does not run. False: it was not."""
        if spec not in self._loaded:
            return False
        self._loaded.discard(spec)
        self._unproven.discard(spec)
        self._compile(spec, self.lowered(spec))
        return True

    def lowered(self, spec: Spec) -> Lowered:
        """Trace a program."""
        source = self._source(spec)
        lowered: Lowered = source.jitted.lower(*source.arguments)
        return lowered

    def save(self) -> None:
        """Write what was compiled to the store, on another thread."""
        while self._unsaved:
            spec, compiled = self._unsaved.popitem()
            self.store.save(self._describe(spec), compiled)

    def _describe(self, spec: Spec) -> str:
        """All that decides the program, beside what is the same for all programs of a process."""
        arrays = (self.weights, self.kv_cache, self.lora)
        sizes = (self.max_kv_blocks, self.num_lora_slots, LABEL_TILE)
        of_platform = COMPILER_OPTIONS.get(self.platform), RESULT_MEMORY.get(self.platform)
        return repr((spec, self.transformer, arrays, sizes, of_platform))

    def _source(self, spec: Spec) -> _Source:
        if isinstance(spec, EmbedSpec):
            return self._embed_source(spec)
        return self._trunk_source(spec) if isinstance(spec, ProgramSpec) else self._head_program_source(spec)

    def _trunk_source(self, spec: ProgramSpec) -> _Source:
        lens = self.input_lens(spec)

        def trunk(
            weights: ModelWeights,
            kv_cache: KVCacheArrays,
            packed: jax.Array,
            mask: jax.Array | None,
            x: jax.Array | None,
            lora: LoraArrays | None,
        ) -> Any:
            adapters = None if lora is None else Adapters(lora, self.num_lora_slots)
            return self.transformer(spec, weights, kv_cache, unpack(packed[0], lens), mask, x, adapters)

        kv_cache_specs: Any = KVCacheArrays(KV_CACHE_SPEC, KV_CACHE_SPEC)  # type: ignore[arg-type]
        mask_spec = P(DATA) if spec.dense_columns else None
        x_spec = P(DATA) if spec.is_embedded else None
        lora_spec = lora_specs() if spec.has_lora else None
        in_specs = (self.weight_specs, kv_cache_specs, P(DATA), mask_spec, x_spec, lora_spec)
        num_shards = self.mesh.shape[DATA]
        packed = self._shape((num_shards, packed_size(lens)), jnp.int32, P(DATA))
        mask = None
        if spec.dense_columns:
            mask = self._shape((num_shards * spec.num_tokens, spec.dense_columns), jnp.bool_, P(DATA))
        out_specs = (LAST_SPECS, kv_cache_specs)
        jitted = self._jit("trunk", trunk, in_specs, out_specs, donate_argnums=(1,))
        x = None
        if spec.is_embedded:
            width = self.transformer.config.model_size
            x = self._shape((num_shards * spec.num_tokens, width), self.weights.embedding.dtype, P(DATA))
        lora = self.lora if spec.has_lora else None
        return _Source(jitted, (self.weights, self.kv_cache, packed, mask, x, lora), out_specs)

    def _embed_source(self, spec: EmbedSpec) -> _Source:
        transformer, num_shards = self.transformer, self.mesh.shape[DATA]

        def embed(embedding: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
            token_ids, overridden = jnp.split(tokens[0], [spec.num_tokens])
            return transformer.embed(embedding, token_ids, (overridden, rows[0]))

        tokens = self._shape((num_shards, spec.num_tokens + spec.num_overrides), jnp.int32, P(DATA))
        shape = (num_shards, spec.num_overrides, transformer.config.model_size)
        rows = self._shape(shape, self.weights.embedding.dtype, P(DATA))
        jitted = self._jit("embed", embed, (self.weight_specs.embedding, P(DATA), P(DATA)), P(DATA))
        return _Source(jitted, (self.weights.embedding, tokens, rows), P(DATA))

    def _head_program_source(self, spec: HeadSpec) -> _Source:
        num_rows = self.mesh.shape[DATA] * self.transformer.rows.score_rows
        hidden = self._shape((num_rows, self.transformer.config.model_size), jnp.float32, HIDDEN_SPEC)
        if spec.num_tokens is not None:
            return self._score_source(spec.num_tokens, has_lora=spec.has_lora)
        if spec.kind == "gather":
            jitted = jax.jit(lambda rows: rows, out_shardings=NamedSharding(self.mesh, P()))
            return _Source(jitted, (hidden,), P())
        if spec.kind == "labels":
            softcap = self.transformer.config.logit_softcap
            function: Callable[..., jax.Array] = partial(
                label_logits, tp_size=self.transformer.tp_size, softcap=softcap
            )
            return self._head_source(spec.kind, function, hidden, self._shape((LABEL_TILE,), jnp.int32, P()))
        config = self.transformer.config
        sizes: Any = {
            "tp_size": self.transformer.tp_size,
            "vocab_size": config.num_head_rows,
            "softcap": config.logit_softcap,
        }
        if spec.kind == "vocabulary":
            token_ids = self._shape((num_rows,), jnp.int32, HIDDEN_SPEC)
            return self._head_source(spec.kind, partial(score_vocabulary, **sizes, top_k=spec.top_k), hidden, token_ids)
        return self._head_source(spec.kind, partial(logsumexp, **sizes), hidden)

    def _score_source(self, num_tokens: int, *, has_lora: bool) -> _Source:
        transformer, num_shards = self.transformer, self.mesh.shape[DATA]

        def score(weights: ModelWeights, last: LastLayer, tokens: jax.Array, lora: LoraArrays | None) -> jax.Array:
            adapters = None if lora is None else Adapters(lora, self.num_lora_slots)
            return transformer.score(weights, last, tokens[0], adapters)

        num_heads = transformer.tp_size * transformer.kv_heads * transformer.heads_per_kv
        widths = transformer.config.model_size, num_heads * transformer.config.head_size
        is_pooled = transformer.config.pooling == "mean"
        dtype = self.weights.embedding.dtype
        dtypes = jnp.float32 if is_pooled else dtype, dtype
        last = [
            self._shape((num_shards * num_tokens, width), each, spec)
            for width, each, spec in zip(widths, dtypes, LAST_SPECS, strict=True)
        ]
        num_numbers = (2 if is_pooled or has_lora else 1) * transformer.rows.score_rows
        tokens = self._shape((num_shards, num_numbers), jnp.int32, P(DATA))
        in_specs = (self.weight_specs, LAST_SPECS, P(DATA), lora_specs() if has_lora else None)
        jitted = self._jit("score", score, in_specs, HIDDEN_SPEC)
        lora = self.lora if has_lora else None
        return _Source(jitted, (self.weights, LastLayer(*last), tokens, lora), HIDDEN_SPEC)  # type: ignore[arg-type]

    def _head_source(self, kind: str, function: Callable[..., jax.Array], *arguments: Any) -> _Source:
        """One device may write the result to the host. With several processes, each of them holds the whole result and
        may fetch it at any time. Hidden states are divided in place of logits."""
        divisor, undivided = self.transformer.config.logit_divisor, function
        if divisor != 1.0:

            def function(head: jax.Array, hidden: jax.Array, *rest: jax.Array) -> jax.Array:
                return undivided(head, hidden / divisor, *rest)

        specs = (self.weight_specs.head, *(each.sharding.spec for each in arguments))
        whole = NamedSharding(self.mesh, P())
        out_sharding = None if whole.is_fully_addressable else whole
        if self.mesh.size == 1 and self.platform in RESULT_MEMORY:
            out_sharding = NamedSharding(self.mesh, HIDDEN_SPEC, memory_kind=RESULT_MEMORY[self.platform])
        jitted = self._jit(kind, function, specs, HIDDEN_SPEC, out_shardings=out_sharding)
        return _Source(jitted, (self.weights.head, *arguments), HIDDEN_SPEC)

    def _shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def _jit(self, name: str, function: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any) -> Any:
        sharded: Any = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        sharded.__name__ = f"{name}{self.store.suffix}"
        return jax.jit(sharded, compiler_options=COMPILER_OPTIONS.get(self.platform), **options)
