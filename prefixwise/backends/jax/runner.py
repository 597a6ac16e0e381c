"""Starting programs and fetching what they found: host arrays in, host arrays out, the pool handed on from each to the
next.

`fetch` waits for the devices, and nothing else does: no program has a loop whose rounds are data on a GPU, where the
driver would wait for their number; blocks of scored rows are one program each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from prefixwise.backends.jax.head import LABEL_BLOCK
from prefixwise.backends.jax.inputs import ForwardInputs, ProgramSpec, pack
from prefixwise.backends.jax.kv_cache import KVCache
from prefixwise.backends.jax.mesh import DATA, P, put_replicated, put_sharded
from prefixwise.backends.jax.model import LastLayer
from prefixwise.backends.jax.programs import Programs
from prefixwise.backends.jax.weights import ModelWeights
from prefixwise.contract.ragged import Int32Array, Int64Array

Floats = NDArray[np.float32]


Blocks = Sequence[Sequence[jax.Array]]  # [dp S, ..] each, by block of scored rows, and then by block of labels


class HeadInputs(NamedTuple):
    """On the devices."""

    score_blocks: tuple[jax.Array, ...]  # [dp, S] tokens each
    label_blocks: tuple[jax.Array, ...]  # [LABEL_BLOCK] label ids each


@dataclass(frozen=True, eq=False)
class Runner:
    """A model on its mesh."""

    mesh: Mesh
    weights: ModelWeights
    pool: KVCache
    programs: Programs

    def trunk(
        self, spec: ProgramSpec, shards: Sequence[ForwardInputs[Int32Array]], masks: Sequence[NDArray[np.bool_]]
    ) -> LastLayer:
        """Still on the devices, [dp T, ..]; one of `shards` and `masks` (if any) per data shard."""
        packed = put_sharded(self.mesh, pack(shards, self.programs.input_lens(spec)), P(DATA))
        mask = put_sharded(self.mesh, np.concatenate(masks), P(DATA)) if masks else None
        last, self.pool.arrays = self.programs.trunk(spec)(self.weights, self.pool.arrays, packed, mask)
        return last

    def head_inputs(self, score_tokens: Sequence[Int64Array], label_ids: Int32Array) -> HeadInputs:
        """What scores need beside a trunk, sent while that is computed.

        `score_tokens`: of each data shard; what is missing to the same whole number of blocks is token 0.
        """
        size = self.programs.transformer.rows.score_rows
        num_blocks = -(-max(map(len, score_tokens)) // size)
        tokens = np.zeros((num_blocks, len(score_tokens), size), np.int32)
        for number, shard in enumerate(score_tokens):
            tokens[:, number].flat[: len(shard)] = shard
        labels = np.zeros((-(-len(label_ids) // LABEL_BLOCK), LABEL_BLOCK), np.int32)
        labels.flat[: len(label_ids)] = label_ids
        return HeadInputs(
            tuple(put_sharded(self.mesh, block, P(DATA)) for block in tokens),
            tuple(put_replicated(self.mesh, block) for block in labels),
        )

    def hidden(self, last: LastLayer, inputs: HeadInputs) -> list[jax.Array]:
        """[dp S, D] of each block of scored rows, still on the devices."""
        score = self.programs.score(len(last.x) // self.mesh.shape[DATA])
        return [score(self.weights, last, tokens) for tokens in inputs.score_blocks]

    def label_logits(self, hidden: Sequence[jax.Array], inputs: HeadInputs) -> Blocks:
        """[dp S, LABEL_BLOCK] each, on their way to the host."""
        head, labels = self.weights.head, self.programs.labels
        return [[_send(labels(head, rows, ids)) for ids in inputs.label_blocks] for rows in hidden]

    def logsumexp(self, hidden: Sequence[jax.Array]) -> Blocks:
        """[dp S] each, on their way to the host."""
        return [[_send(self.programs.normalizers(self.weights.head, rows))] for rows in hidden]

    def fetch(self, blocks: Blocks) -> Floats:
        """Wait for them: [dp, rows, ..], labels side by side along the last axis."""
        num_shards = self.mesh.shape[DATA]
        found = [np.concatenate([np.asarray(array) for array in row], axis=-1) for row in blocks]
        return np.concatenate([each.reshape(num_shards, -1, *each.shape[1:]) for each in found], axis=1)


def _send(array: jax.Array) -> jax.Array:
    """Begin to copy it to the host."""
    array.copy_to_host_async()
    return array
