"""Reading heads: the model's, and those of LoRA adapters that have their own. Rows of one forward may have any.

The rows of each head are read by themselves, in GEMMs of the same fixed shapes, so a row's bits do not depend on the
other rows' heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prefixwise.backends.torch.head_gemms import CUDA_ROW_TILE, LabelHead, VocabularyScores, logsumexp, score_vocabulary
from prefixwise.backends.torch.lora import HeadRows, LoraSlots
from prefixwise.backends.torch.model import Transformer
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.batch import ForwardBatch

if TYPE_CHECKING:
    from prefixwise.backends.torch.cuda.capture import Capture, CapturedRows

log = logging.getLogger("prefixwise")


class Heads:
    """All methods take the hidden states [R, D] of a batch's scored rows, as the head multiplies them."""

    def __init__(self, transformer: Transformer, workers: Workers, loras: LoraSlots | None) -> None:
        self._own, self._tiles = transformer.weights.head, transformer.head_tiles
        self._softcap = transformer.config.logit_softcap
        self._workers, self._loras = workers, loras
        self._label_heads = {0: LabelHead(self._own, self._tiles, self._softcap)}  # by slot; 0: the model's own
        self._few_logsumexps: CapturedRows | None = None

    def capture(self, capture: Capture) -> None:
        """The log-sum-exp of few rows is one CUDA graph: its launches take the host longer than the GPU needs."""
        from prefixwise.backends.torch.cuda.capture import CapturedRows

        def run() -> CapturedRows:
            rows = torch.zeros(CUDA_ROW_TILE, self._own.shape[1], device=self._own.device)
            return CapturedRows(capture, lambda rows: self._logsumexp(self._own, rows), rows)

        try:
            self._few_logsumexps = self._workers.drive(run)
        except Exception as error:  # too little memory: the same operations, launched one by one
            log.warning("the log-sum-exp of few rows takes the host longer than it could: %s", error)

    def forget(self, slot: int) -> None:
        """Another adapter is in the slot."""
        self._label_heads.pop(slot, None)

    def labels(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """[R, L]: the logits of the batch's labels."""

        def read(group: HeadRows, rows: Tensor) -> list[Tensor]:
            return [self._label_head(group.slot)(rows, batch.label_ids[group.rows])]

        groups = self._groups(batch)
        return _together(groups, hidden, read)[0] if groups else self._label_heads[0](hidden, batch.label_ids)

    def logsumexp(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """[R]: over the vocabulary."""
        groups, few = self._groups(batch), self._few_logsumexps
        if groups:
            return _together(groups, hidden, lambda group, rows: [self._logsumexp(self._head(group.slot), rows)])[0]
        return self._logsumexp(self._own, hidden) if few is None or len(hidden) > few.num_rows else few(hidden)

    def _logsumexp(self, head: Tensor, rows: Tensor) -> Tensor:
        return logsumexp(rows, head, self._workers, self._tiles, self._softcap)

    def vocabulary(self, batch: ForwardBatch, hidden: Tensor, token_ids: Tensor) -> VocabularyScores:
        """One pass over the vocabulary. `token_ids`: [R]."""

        def of_head(head: Tensor, rows: Tensor, ids: Tensor) -> VocabularyScores:
            return score_vocabulary(rows, head, ids, batch.top_k, self._workers, self._tiles, self._softcap)

        groups = self._groups(batch)
        if not groups:
            return of_head(self._own, hidden, token_ids)
        return VocabularyScores(
            *_together(
                groups, hidden, lambda group, rows: of_head(self._head(group.slot), rows, token_ids[group.on_device])
            )
        )

    def _groups(self, batch: ForwardBatch) -> list[HeadRows]:
        """The rows by their heads; none if all have the model's."""
        if batch.lora_slots is None or self._loras is None:
            return []
        return self._loras.head_rows(batch.lora_slots[batch.score_tokens])

    def _head(self, slot: int) -> Tensor:
        own = None if self._loras is None else self._loras.head(slot)
        return self._own if own is None else own

    def _label_head(self, slot: int) -> LabelHead:
        if slot not in self._label_heads:
            self._label_heads[slot] = LabelHead(self._head(slot), self._tiles, self._softcap)
        return self._label_heads[slot]


def _together(
    groups: Sequence[HeadRows], hidden: Tensor, read: Callable[[HeadRows, Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """What `read` returns for the rows of each head, in the order of all rows: tensors [R, ..]."""
    found = [read(group, hidden[group.on_device]) for group in groups]
    whole = [torch.empty((len(hidden), *part.shape[1:]), dtype=part.dtype, device=part.device) for part in found[0]]
    for group, parts in zip(groups, found, strict=True):
        for target, part in zip(whole, parts, strict=True):
            target[group.on_device] = part
    return whole
