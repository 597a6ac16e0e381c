"""The head: from the hidden state after an item to the logits of its labels, in float32.

Only the label rows of the head are multiplied, unless a probability over the whole vocabulary is asked for; then its
log-sum-exp is taken in blocks of the vocabulary, and no [rows, V] array ever exists. All products have one fixed shape.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.model import pad_rows
from prefixwise.backends.torch.transfer import upload
from prefixwise.backends.torch.workers import Workers
from prefixwise.contract.ragged import Int32Array

ROW_BLOCK = 64  # hidden states at a time
LABEL_BLOCK = 16  # label rows of the head at a time
VOCAB_BLOCK = 8192  # vocabulary rows of the head at a time


def label_logits(hidden: Tensor, head: Tensor, label_ids: Int32Array) -> Tensor:
    """hidden [R, D] float32, head [V, D], label_ids [R, L] to [R, L] float32."""
    distinct, columns = np.unique(label_ids, return_inverse=True)
    rows = _padded_to_multiple(head[upload(distinct, head.device).long()].float(), LABEL_BLOCK)
    blocks = [_product(hidden, rows[start : start + LABEL_BLOCK]) for start in range(0, len(rows), LABEL_BLOCK)]
    column_of = upload(columns.reshape(label_ids.shape), head.device).long()
    return torch.cat(blocks, 1).gather(1, column_of)


def logsumexp(hidden: Tensor, head: Tensor, workers: Workers) -> Tensor:
    """The log-sum-exp of all logits: hidden [R, D] float32, head [V, D] to [R] float32."""
    padded = _padded_to_multiple(hidden, ROW_BLOCK)
    vocab_starts = range(0, len(head), VOCAB_BLOCK)
    parts = hidden.new_empty(len(vocab_starts), len(padded))

    def sum_vocab_block(number: int) -> None:
        rows = head[vocab_starts[number] :][:VOCAB_BLOCK].float().T
        for first in range(0, len(padded), ROW_BLOCK):
            logits = padded[first : first + ROW_BLOCK] @ rows
            parts[number, first : first + ROW_BLOCK] = torch.logsumexp(_aligned(logits), -1)

    workers.run(sum_vocab_block, range(len(vocab_starts)))
    total = parts[0]
    for part in parts[1:]:
        total = torch.logaddexp(total, part)
    return total[: len(hidden)]


def _aligned(logits: Tensor) -> Tensor:
    """Columns of -inf up to a multiple of 16: CUDA sums other rows in an order that depends on their place."""
    return F.pad(logits, (0, -logits.shape[1] % 16), value=float("-inf"))


def _padded_to_multiple(rows: Tensor, multiple: int) -> Tensor:
    return pad_rows(rows, -(-len(rows) // multiple) * multiple)


def _product(hidden: Tensor, rows: Tensor) -> Tensor:
    blocks = [
        pad_rows(hidden[start : start + ROW_BLOCK], ROW_BLOCK) @ rows.T for start in range(0, len(hidden), ROW_BLOCK)
    ]
    return torch.cat(blocks)[: len(hidden)]
