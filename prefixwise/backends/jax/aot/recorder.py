"""A model on devices that are only described: it computes nothing, and remembers what it was asked to."""

from __future__ import annotations

import numpy as np

from prefixwise.backends.jax.aot.topology import Slice
from prefixwise.backends.jax.assembly import Assembly, assemble, attention_kind
from prefixwise.backends.jax.attention.api import choose_implementation
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.backends.jax.attention.pallas_tpu import PallasTpuAttention
from prefixwise.backends.jax.data_shards import split_batch
from prefixwise.backends.jax.devices import resolve_dtype
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.mesh import make_mesh
from prefixwise.forward.backend import Backend, BackendOptions
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, KVBlock, RunningForward
from prefixwise.models.config import ModelConfig


class RecordedBlock(KVBlock):
    """Its length is all that there is."""


class RecordingBackend(Backend):
    """Stands where `JaxBackend` would, on a real slice."""

    def __init__(
        self,
        config: ModelConfig,
        options: BackendOptions,
        slice_: Slice,
        attention: AttentionImplementation | None = None,
    ) -> None:
        """`attention`: in place of the one that is chosen there."""
        self.config = config
        dtype = resolve_dtype(options.dtype, "tpu")
        mesh = make_mesh(slice_.choice.devices, options.dp_size, options.tp_size)
        kind = attention_kind(config, slice_.choice, dtype)
        chosen = attention or choose_implementation(options.attention, **kind)
        if attention is None and isinstance(chosen, PallasTpuAttention):
            chosen = PallasTpuAttention(device=slice_.choice.devices[0].device_kind)
        self.assembly: Assembly = assemble(config, options, slice_.choice, mesh, dtype, chosen)
        self.info = self.assembly.info
        self.forwards: list[ForwardBatch] = []

    def spec(self, batch: ForwardBatch) -> ProgramSpec:
        """The trunk that would run it."""
        parts = split_batch(batch, self.info.num_copies)
        return self.assembly.spec(batch, max(part.num_tokens for part, _ in parts))

    def num_score_blocks(self, batch: ForwardBatch) -> int:
        """How often the programs behind the trunk run for it."""
        most = max(len(rows) for _, rows in split_batch(batch, self.info.num_copies))
        return -(-most // self.assembly.rows.score_rows)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return self.assembly.dtype.itemsize

    def start(self, batch: ForwardBatch) -> RunningForward:
        self.forwards.append(batch)
        lens = np.diff(batch.segment_starts)
        blocks = tuple(RecordedBlock(int(lens[segment])) for segment in batch.cache_segments)
        normalizers = np.zeros(len(batch.score_tokens), np.float32) if batch.need_logsumexp else None
        output = ForwardOutput(np.zeros(batch.label_ids.shape, np.float32), normalizers, blocks)
        return RunningForward(blocks, lambda: output)
