"""Starting programs and fetching what they found: host arrays in, host arrays out, the pool handed on from each to the
next.

`fetch` waits for the devices, and nothing else does but a GPU's driver: it starts the rounds of a loop one by one where
their number is data, as that of the blocks of scored rows is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from itemwise.backends.jax.head import LABEL_BLOCK
from itemwise.backends.jax.inputs import ForwardInputs, ProgramSpec, pack
from itemwise.backends.jax.mesh import DATA, P, put_replicated, put_sharded
from itemwise.backends.jax.pool import PagePool
from itemwise.backends.jax.programs import Programs
from itemwise.backends.jax.weights import ModelWeights
from itemwise.contract.ragged import Int32Array

Floats = NDArray[np.float32]


class HeadInputs(NamedTuple):
    """On the devices."""

    label_blocks: tuple[jax.Array, ...]  # [LABEL_BLOCK] label ids each
    num_blocks: jax.Array  # [dp]: how many blocks of scored rows are used


@dataclass(frozen=True, eq=False)
class Runner:
    """A model on its mesh."""

    mesh: Mesh
    weights: ModelWeights
    pool: PagePool
    programs: Programs

    def hidden(
        self, spec: ProgramSpec, shards: Sequence[ForwardInputs[Int32Array]], masks: Sequence[NDArray[np.bool_]]
    ) -> jax.Array | None:
        """[dp T, D] of the scored tokens, still on the devices; one of `shards` and `masks` (if any) per data shard."""
        packed = put_sharded(self.mesh, pack(shards, self.programs.input_lens(spec)), P(DATA))
        mask = put_sharded(self.mesh, np.concatenate(masks), P(DATA)) if masks else None
        hidden, self.pool.arrays = self.programs.trunk(spec)(self.weights, self.pool.arrays, packed, mask)
        return hidden

    def head_inputs(self, label_ids: Int32Array, num_blocks: Int32Array) -> HeadInputs:
        """What the head needs beside hidden states; sent before they are computed, so that nothing waits for it."""
        blocks = [label_ids[start : start + LABEL_BLOCK] for start in range(0, len(label_ids), LABEL_BLOCK)]
        padded = (np.pad(block, (0, LABEL_BLOCK - len(block))) for block in blocks)
        return HeadInputs(
            tuple(put_replicated(self.mesh, block) for block in padded), put_sharded(self.mesh, num_blocks, P(DATA))
        )

    def label_logits(self, hidden: jax.Array, inputs: HeadInputs) -> tuple[jax.Array, ...]:
        """[dp T, LABEL_BLOCK] of each block of labels, on their way to the host."""
        head, labels = self.weights.head, self.programs.labels
        self.programs.count_head("labels", hidden)
        return tuple(self._send(labels(head, hidden, ids, inputs.num_blocks)) for ids in inputs.label_blocks)

    def log_normalizers(self, hidden: jax.Array, inputs: HeadInputs) -> tuple[jax.Array, ...]:
        """One of [dp T], on its way to the host."""
        self.programs.count_head("normalizers", hidden)
        return (self._send(self.programs.normalizers(self.weights.head, hidden, inputs.num_blocks)),)

    def _send(self, array: jax.Array) -> jax.Array:
        """Begin to copy it to the host. What other processes have of it is asked for now, too: all of them start
        forwards in one order, but who waits for which when is their own business."""
        whole = array if array.is_fully_addressable else self.programs.whole(array)
        whole.copy_to_host_async()
        return whole

    def fetch(self, arrays: Sequence[jax.Array]) -> Floats:
        """Wait for them: [dp, T, ..], side by side along the last axis."""
        found = [np.asarray(array) for array in arrays]
        return np.concatenate([each.reshape(self.mesh.shape[DATA], -1, *each.shape[1:]) for each in found], axis=-1)
