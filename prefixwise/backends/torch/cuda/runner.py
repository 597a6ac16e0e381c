"""`PagedRunner`: from a batch to the hidden states of its scored tokens, through the programs and the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixwise.backends.torch.cuda.attention import PagedAttention
from prefixwise.backends.torch.cuda.inputs import ForwardInputs, ProgramSpec, TileArrays, host_inputs
from prefixwise.backends.torch.cuda.kv_cache import KVCache, PagedBlock
from prefixwise.backends.torch.cuda.programs import Programs
from prefixwise.backends.torch.cuda.trunk import Trunk
from prefixwise.backends.torch.model import Transformer
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.backend import Program
from prefixwise.forward.batch import ForwardBatch, KVBlock
from prefixwise.forward.buckets import token_buckets
from prefixwise.forward.kv_pages import batch_tiles, page_table
from prefixwise.forward.tiles import KEY_TILE, read_lens

MAX_BLOCKS_PER_PAGE = 2  # prefixes of one forward may share pages, which are then listed more than once
COARSE_STEP = 4  # from one size of a forward to the next, where few are wanted
STEPS_PER_DOUBLING = 32  # where not: a recording takes the host some 60 ms, so every 256 tokens up to 16,384 have one
TOKEN_MULTIPLE = 256  # from this many rows on cuBLAS adds in one order, whatever the number of rows


class PagedRunner:
    """A model on a CUDA device."""

    def __init__(
        self,
        transformer: Transformer,
        attention: PagedAttention,
        *,
        num_pages: int,
        max_tokens: int,  # of a forward that is recorded, and has its memory from the beginning
        is_coarse: bool = False,  # fewer sizes of forwards?
        records: bool = True,
    ) -> None:
        config, embedding = transformer.config, transformer.weights.embedding
        self._transformer, self._attention = transformer, attention
        self.pool = KVCache(
            num_layers=config.num_layers,
            num_pages=num_pages,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=embedding.dtype,
            device=embedding.device,
        )
        trunk = Trunk(
            config, transformer.weights, attention, self.pool, transformer.block_rows, transformer.frequencies
        )
        smallest = transformer.block_rows or TOKEN_MULTIPLE
        self.buckets = token_buckets(
            max_tokens,
            smallest=smallest,
            step=COARSE_STEP if is_coarse else None,
            steps_per_doubling=STEPS_PER_DOUBLING,
        )
        self.max_kv_blocks_read = MAX_BLOCKS_PER_PAGE * num_pages
        self._programs = Programs(trunk, self.buckets, self.max_kv_blocks_read, records=records)

    def start(self, batch: ForwardBatch) -> tuple[tuple[PagedBlock, ...], Tensor | None]:
        """Queue a forward: the blocks that it keeps, and the hidden states [R, D] of its scored tokens, if any.

        Raises BackendError where the blocks do not fit.
        """
        lens, stored = np.diff(batch.segment_starts), (*batch.cache_segments, *_passing_segments(batch))
        blocks = self.pool.take([int(lens[segment]) for segment in stored])
        try:
            hidden = self._send(batch, dict(zip(stored, map(self.pool.address, blocks), strict=True)))
        except BaseException:
            release(blocks)
            raise
        # Pages for this forward alone go back now: whoever writes to them next comes later in the stream.
        release(blocks[len(batch.cache_segments) :])
        return blocks[: len(batch.cache_segments)], hidden

    def _send(self, batch: ForwardBatch, new_pages: Mapping[int, int]) -> Tensor | None:
        """`new_pages`: addresses for the segments that go to the pool."""
        spec = self._spec(batch)
        lists = page_table(batch, new_pages, self.pool.address) if spec.reads == "pool" else batch_tiles(batch)
        inputs = host_inputs(batch, spec, self._attention.tile_sizes, lists, new_pages)
        return self._run(spec, inputs, len(batch.score_tokens))

    def _run(self, spec: ProgramSpec, inputs: ForwardInputs[Int32Array], num_scored: int) -> Tensor | None:
        on_device, buffers = self._programs.run(spec, inputs)
        if not spec.scores:
            return None
        tokens = on_device.score_tokens[: -(-num_scored // TOKEN_MULTIPLE) * TOKEN_MULTIPLE]
        return self._transformer.finish_scored(buffers.x, buffers.attended.flatten(1), tokens)[:num_scored]

    def _spec(self, batch: ForwardBatch) -> ProgramSpec:
        """What a forward keeps it writes to the pool before it attends, so that is where all of it is read."""
        num_tokens, scores = self._programs.bucket(batch.num_tokens), len(batch.score_tokens) > 0
        return ProgramSpec(num_tokens, "pool" if _reads_pool(batch) else "batch", scores)

    def programs(self) -> list[Program]:
        """All that a forward can need: for each size prefill, rows and extend. The largest first, as its memory serves
        the others."""
        kinds: tuple[tuple[Any, bool], ...] = (("pool", False), ("batch", True), ("pool", True))
        specs = [ProgramSpec(size, reads, scores) for size in self.buckets[::-1] for reads, scores in kinds]
        return [Program(spec.title, None, partial(self._prepare, spec)) for spec in specs]

    @torch.inference_mode()
    def _prepare(self, spec: ProgramSpec) -> None:
        self._run(spec, _one_token(spec), 1)
        if self.pool.keys.is_cuda:
            torch.cuda.synchronize(self.pool.keys.device)

    @property
    def num_captured(self) -> int:
        return self._programs.num_captured

    def probe(self) -> None:
        """Run the smallest program of each kind: what cannot work fails here, not in a request."""
        for program in self.programs()[-3:]:
            program.prepare()


def release(blocks: Iterable[KVBlock]) -> None:
    """Give their pages back at once, whoever still holds them: an exception holds the frames that it came through."""
    for block in blocks:
        block.release()


def _reads_pool(batch: ForwardBatch) -> bool:
    return bool(batch.cache_segments) or any(prefix.blocks for prefix in batch.prefixes)


def _passing_segments(batch: ForwardBatch) -> list[int]:
    """Blocks that are read in the pool, and are not kept: they need a page while the forward runs."""
    if not _reads_pool(batch):
        return []
    longest, lens = np.zeros(len(batch.prefixes), np.int64), read_lens(batch)
    np.maximum.at(longest, batch.prefix_index[lens > 0], lens[lens > 0])
    found: list[int] = []
    for prefix, length in zip(batch.prefixes, longest.tolist(), strict=True):
        if prefix.segment is not None:
            num_new = -(-length // KEY_TILE) - len(prefix.blocks)
            found += range(prefix.segment, prefix.segment + max(0, num_new))
    return sorted(set(found) - set(batch.cache_segments))


def _one_token(spec: ProgramSpec) -> ForwardInputs[Int32Array]:
    """A segment of one token, which reads no prefix; nothing is kept."""
    nothing, zero, one = np.zeros(0, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    zeros = np.zeros(spec.num_tokens, np.int32)
    tiles = TileArrays(*[nothing] * len(TileArrays._fields))
    return ForwardInputs(
        token_ids=zeros,
        positions=zeros,
        cache_slots=zeros - 1 if spec.reads == "pool" else nothing,
        score_tokens=zeros if spec.scores else nothing,
        tiles=tiles._replace(counts=np.array([1, 0, 0], np.int32), narrow_start=zero, narrow_len=one),
    )
