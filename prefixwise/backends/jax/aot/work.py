"""What a forward has to compute and to read at the least, counted by hand from its geometry.

The compiler's own count takes the loop over layers for one round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.backends.jax.head import LABEL_BLOCK
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.tiles import read_lens
from prefixwise.models.config import ModelConfig, layer_parameter_shapes

_PROJECTIONS = ("q", "k", "v")
_AFTER_ATTENTION = ("o", "gate", "up", "down")


@dataclass(frozen=True)
class Work:
    """Of all devices together; a multiplication and an addition are two FLOPs."""

    flops: int
    bytes_read: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes_read + other.bytes_read)


def trunk_work(config: ModelConfig, batch: ForwardBatch, spec: ProgramSpec, itemsize: int) -> Work:
    """All layers up to the last one's attention: every weight read once, every kept prefix, a dense mask in each
    layer. Padding is not counted."""
    layers, before, after = config.num_layers, _weights(config, _PROJECTIONS), _weights(config, _AFTER_ATTENTION)
    linear = 2 * batch.num_tokens * (layers * before + (layers - 1) * after)
    attention = 4 * config.num_heads * config.head_size * _pairs(batch) * layers
    kept = sum(block.num_tokens for prefix in batch.prefixes for block in prefix.blocks)
    numbers = layers * before + (layers - 1) * after + 2 * layers * config.num_kv_heads * config.head_size * kept
    mask = layers * batch.num_tokens * spec.dense_columns
    return Work(linear + attention, itemsize * numbers + mask)


def score_work(config: ModelConfig, num_rows: int, itemsize: int) -> Work:
    """The last layer behind its attention, for the rows that are scored."""
    numbers = _weights(config, _AFTER_ATTENTION)
    return Work(2 * num_rows * numbers, itemsize * numbers)


def labels_work(config: ModelConfig, num_rows: int, itemsize: int) -> Work:
    """A block of labels for each of these rows."""
    numbers = LABEL_BLOCK * config.model_size
    return Work(2 * num_rows * numbers, itemsize * numbers)


def normalizers_work(config: ModelConfig, num_rows: int, itemsize: int) -> Work:
    """The whole head for each of these rows."""
    numbers = config.num_head_rows * config.model_size
    return Work(2 * num_rows * numbers, itemsize * numbers)


def _weights(config: ModelConfig, names: tuple[str, ...]) -> int:
    shapes = layer_parameter_shapes(config)
    return sum(int(np.prod(shapes[name])) for name in names)


def _pairs(batch: ForwardBatch) -> int:
    """Queries and keys that see each other."""
    lens = np.diff(batch.segment_starts)
    return int((lens * read_lens(batch) + lens * (lens + 1) // 2).sum())
