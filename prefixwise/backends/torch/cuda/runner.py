"""`PagedRunner`: from a batch to the hidden states of its scored tokens, through CUDA graphs and the paged KV cache.

The host needs longer to launch a layer's kernels than the device to run them, unless there are thousands of tokens. A
CUDA graph is one launch. There is one graph of the trunk per `ProgramSpec`, captured on first use. Each graph reads its
integers from one buffer and works in one workspace, which all graphs share: forwards run in order. A graph begins with
the embeddings. Where some of them are overridden, they are written first, and another graph begins behind them. Where
few tokens are scored, one more graph, the same for all programs, takes them from the trunk to their hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from prefixwise.backends.torch.cuda.attention import PagedAttention
from prefixwise.backends.torch.cuda.capture import Capture
from prefixwise.backends.torch.cuda.inputs import (
    ForwardInputs,
    ProgramSpec,
    TileArrays,
    Uploads,
    capacities,
    flat,
    host_inputs,
    packing,
    unpack,
)
from prefixwise.backends.torch.cuda.kv_cache import KVCache, PagedBlock
from prefixwise.backends.torch.cuda.trunk import Buffers, FusedGemms, Trunk, Workspace
from prefixwise.backends.torch.fp8 import KVFormat
from prefixwise.backends.torch.invariant_rows import RowCounts
from prefixwise.backends.torch.lora import LoraRows, LoraSlots
from prefixwise.backends.torch.model import EmbeddingRows, Transformer, embedding_rows
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.backend import Program
from prefixwise.forward.batch import ForwardBatch, KVBlock
from prefixwise.forward.buckets import Buckets, token_buckets
from prefixwise.forward.kv_pages import batch_tiles, page_table
from prefixwise.forward.tiles import KEY_TILE, Packing

MAX_BLOCKS_PER_PAGE = 2  # prefixes of one forward may share pages, which the page table then lists more than once
COARSE_STEP = 4  # factor from one bucket to the next, with `is_coarse`
STEPS_PER_DOUBLING = 32  # without: capturing a graph takes about 40 ms, and padding takes as long as other tokens
TOKEN_MULTIPLE = 256  # of whole waves, and where GEMMs were not tried (`invariant_rows.py`)


class CudaGraphs:
    """The captured programs. A size above the largest bucket runs without a graph."""

    def __init__(
        self,
        trunk: Trunk,
        buckets: Sequence[int],
        max_kv_blocks: int,
        finish: Callable[[Tensor, Tensor], Tensor],  # `Transformer.finish`
        num_scored: int,  # rows of its graph
        *,
        captures: bool = True,
    ) -> None:
        self._trunk, self._buckets, self._max_kv_blocks = trunk, Buckets(tuple(buckets)), max_kv_blocks
        self._finish, self._num_scored = finish, num_scored
        self._device = trunk.weights.embedding.device
        self._dtype = trunk.weights.embedding.dtype
        self._workspace = self._make_workspace(self._buckets.largest)
        self._uploads = Uploads(self._largest_input(), self._device)
        self._packings: dict[ProgramSpec, Packing] = {}
        self._views: dict[ProgramSpec, tuple[ForwardInputs[Tensor], Buffers]] = {}
        self._graphs: dict[ProgramSpec, torch.cuda.CUDAGraph] = {}
        self._finish_graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None  # and what it writes
        self.capture = Capture(self._device) if captures else None

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def bucket(self, num_tokens: int) -> int:
        """The token count that a forward is padded to; above the largest bucket a multiple of the smallest."""
        return self._buckets.fit(num_tokens)

    def run(
        self, spec: ProgramSpec, inputs: ForwardInputs[Int32Array], overrides: EmbeddingRows | None = None
    ) -> tuple[ForwardInputs[Tensor], Buffers]:
        """Queue a forward. The next forward overwrites the tensors that this returns, in the stream's order."""
        layout, uploads = self._packing(spec), self._uploads
        if spec.num_tokens <= self._buckets.largest:
            on_device, buffers = self._tensors(spec, layout)
        else:
            uploads = Uploads(layout.size, self._device)
            on_device = unpack(layout, uploads.on_device)
            buffers = self._make_workspace(spec.num_tokens).buffers(spec.num_tokens)
        uploads.send(layout.size, lambda target: layout.pack(flat(inputs), target))
        capture = self._capture_of(spec)
        if capture is not None and spec not in self._graphs:
            self._graphs[spec], _ = capture(lambda: self._trunk(spec, on_device, buffers))
        if spec.is_embedded:
            self._trunk.embed(on_device, buffers, overrides)
        if capture is None:
            self._trunk(spec, on_device, buffers)
        else:
            self._graphs[spec].replay()
        return on_device, buffers

    def finish(self, spec: ProgramSpec, buffers: Buffers) -> Tensor:
        """The hidden states [S, D] of the first scored tokens of a forward that `run` has queued. The next forward
        overwrites them."""
        rows = buffers.scored_x, buffers.scored_attended[: self._num_scored]
        capture = self._capture_of(spec)
        if capture is None:
            return self._finish(*rows)
        if self._finish_graph is None:
            self._finish_graph = capture(lambda: self._finish(*rows))
        graph, hidden = self._finish_graph
        graph.replay()
        return hidden

    def _capture_of(self, spec: ProgramSpec) -> Capture | None:
        """None: it runs without a CUDA graph."""
        return self.capture if spec.num_tokens <= self._buckets.largest else None

    def _make_workspace(self, num_tokens: int) -> Workspace:
        config, is_fp8, loras = self._trunk.config, self._trunk.is_fp8, self._trunk.loras
        tails = (0, 0, 0) if loras is None else loras.tails
        return Workspace(
            config,
            num_tokens,
            self._dtype,
            self._device,
            num_scored=self._num_scored,
            is_fp8=is_fp8,
            has_query_codes=self._trunk.kv_cache.layer(0).has_fp8_queries,
            tails=tails,
        )

    def _packing(self, spec: ProgramSpec) -> Packing:
        if spec not in self._packings:
            lens = capacities(spec, self._trunk.attention.tile_sizes, self._max_kv_blocks)
            self._packings[spec] = packing(lens)
        return self._packings[spec]

    def _tensors(self, spec: ProgramSpec, layout: Packing) -> tuple[ForwardInputs[Tensor], Buffers]:
        """The inputs and the activations of a program: views of memory that stays in its place, made once."""
        if spec not in self._views:
            self._views[spec] = unpack(layout, self._uploads.on_device), self._workspace.buffers(spec.num_tokens)
        return self._views[spec]

    def _largest_input(self) -> int:
        largest = self._buckets.largest
        sizes = self._trunk.attention.tile_sizes
        specs = [ProgramSpec(largest, reads, scores=True, has_lora=True) for reads in ("batch", "cache")]
        return max(packing(capacities(spec, sizes, self._max_kv_blocks)).size for spec in specs)


class PagedRunner:
    """A model with its KV cache and CUDA graphs on a device."""

    def __init__(
        self,
        transformer: Transformer,
        attention: PagedAttention,
        *,
        num_pages: int,
        max_tokens: int,  # of a forward with a CUDA graph and preallocated memory
        is_coarse: bool = False,  # fewer buckets?
        captures: bool = True,
        loras: LoraSlots | None = None,
        kv_format: KVFormat = "auto",
        fused_gemms: FusedGemms = FusedGemms(),  # noqa: B008  # frozen
    ) -> None:
        config, embedding = transformer.config, transformer.weights.embedding
        self._transformer, self._attention, self._loras = transformer, attention, loras
        self.kv_cache = KVCache(
            num_layers=config.num_layers,
            num_pages=num_pages,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=embedding.dtype,
            device=embedding.device,
            kv_format=kv_format,
        )
        trunk = Trunk(
            config,
            transformer.weights,
            attention,
            self.kv_cache,
            transformer.cut,
            transformer.rotary,
            transformer.local_rotary,
            transformer.elementwise_ops,
            loras,
            fused_gemms,
        )
        rows = transformer.tile_rows or TOKEN_MULTIPLE
        multiple, smallest = transformer.row_counts or (rows, rows)
        rows = min(rows, TOKEN_MULTIPLE)
        self._score_rows = transformer.row_counts or RowCounts(rows, rows)  # of the last layer's end and the head
        self.buckets = token_buckets(
            max_tokens,
            smallest=smallest,
            multiple=multiple,
            step=COARSE_STEP if is_coarse else None,
            steps_per_doubling=STEPS_PER_DOUBLING,
        )
        self.max_kv_blocks_read = MAX_BLOCKS_PER_PAGE * num_pages
        self._cuda_graphs = CudaGraphs(
            trunk, self.buckets, self.max_kv_blocks_read, transformer.finish, self._score_rows.least, captures=captures
        )

    def start(self, batch: ForwardBatch) -> tuple[tuple[PagedBlock, ...], Tensor | None]:
        """Queue a forward. Returns the KV blocks that it caches, and the hidden states [R, D] of scored tokens.

        Raises BackendError where the blocks do not fit.
        """
        starts: list[int] = batch.segment_starts.tolist()
        stored = (*batch.cache_segments, *_temporary_segments(batch))
        blocks = self.kv_cache.take([starts[segment + 1] - starts[segment] for segment in stored])
        try:
            hidden = self._send(batch, dict(zip(stored, map(self.kv_cache.address, blocks), strict=True)))
        except BaseException:
            release(blocks)
            raise
        # Temporary pages are released now: the next forward that writes to them comes later in the stream.
        release(blocks[len(batch.cache_segments) :])
        return blocks[: len(batch.cache_segments)], hidden

    def _send(self, batch: ForwardBatch, new_pages: Mapping[int, int]) -> Tensor | None:
        """`new_pages`: addresses for the segments that go to the KV cache."""
        spec = self._spec(batch)
        lists = page_table(batch, new_pages, self.kv_cache.address) if spec.reads == "cache" else batch_tiles(batch)
        num_rows = self._padded_rows(len(batch.score_tokens), spec)
        inputs = host_inputs(batch, spec, self._attention.tile_sizes, lists, new_pages, num_rows)
        overrides = embedding_rows(batch, self.kv_cache.keys.device)
        lora = None
        if self._loras is not None and batch.lora_slots is not None and spec.scores:
            lora = self._loras.rows(batch.lora_slots[batch.score_tokens])
        return self._run(spec, inputs, len(batch.score_tokens), overrides, lora)

    def _run(
        self,
        spec: ProgramSpec,
        inputs: ForwardInputs[Int32Array],
        num_scored: int,
        overrides: EmbeddingRows | None = None,
        lora: LoraRows | None = None,  # of the scored tokens
    ) -> Tensor | None:
        on_device, buffers = self._cuda_graphs.run(spec, inputs, overrides)
        if not spec.scores:
            return None
        if num_scored <= self._score_rows.least and lora is None:
            return self._cuda_graphs.finish(spec, buffers)[:num_scored]
        num_rows = self._padded_rows(num_scored, spec)
        x = buffers.x.index_select(0, on_device.score_tokens[:num_rows])
        return self._transformer.finish(x, buffers.scored_attended[:num_rows], lora)[:num_scored]

    def _padded_rows(self, num_scored: int, spec: ProgramSpec) -> int:
        """Scored tokens with padding: no more than all tokens with theirs."""
        return min(self._score_rows.padded(num_scored), spec.num_tokens)

    def _spec(self, batch: ForwardBatch) -> ProgramSpec:
        """A forward writes the segments that it caches before it attends, so it reads all prefixes in the KV cache. So
        does one without a prefix, as an item has the same program alone and beside others."""
        num_tokens, scores = self._cuda_graphs.bucket(batch.num_tokens), len(batch.score_tokens) > 0
        is_embedded = batch.embed_overrides is not None
        has_prefix_in_batch = not _reads_cache(batch) and any(each.segment is not None for each in batch.prefixes)
        reads: Literal["batch", "cache"] = "batch" if has_prefix_in_batch else "cache"
        return ProgramSpec(num_tokens, reads, scores, is_embedded, has_lora=batch.lora_slots is not None)

    def programs(self, *, has_sequences: bool = True) -> list[Program]:
        """Every program that a forward can need unless it has embedding overrides: prefill, sequences, for those of
        serial and packed, and extend for each bucket. The largest comes first, because all programs use its memory."""
        kinds: list[tuple[Any, bool]] = [("cache", False), ("batch", True), ("cache", True)]
        if not has_sequences:
            del kinds[1]
        adapted = (False,) if self._loras is None else (True, False)
        specs = [
            ProgramSpec(size, reads, scores, has_lora=has_lora)
            for size in self.buckets[::-1]
            for has_lora in adapted
            for reads, scores in kinds
        ]
        return [Program(spec.title, None, partial(self._prepare, spec)) for spec in specs]

    @torch.inference_mode()
    def _prepare(self, spec: ProgramSpec) -> None:
        self._run(spec, _one_token(spec, self._padded_rows(1, spec)), 1)
        if self.kv_cache.keys.is_cuda:
            torch.cuda.synchronize(self.kv_cache.keys.device)

    @property
    def num_captured(self) -> int:
        return self._cuda_graphs.num_captured

    @property
    def capture(self) -> Capture | None:
        """For what follows a forward on its stream; None: there are no CUDA graphs."""
        return self._cuda_graphs.capture

    @property
    def wave_tokens(self) -> int:
        """Forwards of a multiple of so many tokens use all multiprocessors to the end."""
        keys = self.kv_cache.keys
        if not keys.is_cuda:
            return 1
        num_processors = torch.cuda.get_device_properties(keys.device).multi_processor_count
        num_kv_heads = self._transformer.config.num_kv_heads
        return self._attention.tile_sizes.wave_tokens(num_processors, num_kv_heads, TOKEN_MULTIPLE)

    def probe(self) -> None:
        """Run the smallest program of each kind, so that a program that cannot work fails here, not in a request."""
        for program in self.programs()[-3 if self._loras is None else -6 :]:
            program.prepare()


def release(blocks: Iterable[KVBlock]) -> None:
    """Release their pages at once, even while something still holds them: an exception holds its frames."""
    for block in blocks:
        block.release()


def _reads_cache(batch: ForwardBatch) -> bool:
    return bool(batch.cache_segments) or any(prefix.blocks for prefix in batch.prefixes)


def _temporary_segments(batch: ForwardBatch) -> list[int]:
    """KV blocks that are read in the KV cache but not cached: they need a page while the forward runs."""
    if not _reads_cache(batch):
        return []
    found: list[int] = []
    for prefix, length in zip(batch.prefixes, batch.longest_reads, strict=True):
        if prefix.segment is not None:
            num_new = -(-length // KEY_TILE) - len(prefix.blocks)
            found += range(prefix.segment, prefix.segment + max(0, num_new))
    return sorted(set(found) - set(batch.cache_segments))


def _one_token(spec: ProgramSpec, num_score_rows: int) -> ForwardInputs[Int32Array]:
    """A segment of one token, which reads no prefix; nothing is cached."""
    nothing, zero, one = np.zeros(0, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    zeros = np.zeros(spec.num_tokens, np.int32)
    tiles = TileArrays(*[nothing] * len(TileArrays._fields))
    return ForwardInputs(
        token_ids=zeros,
        positions=zeros,
        cache_slots=zeros - 1 if spec.reads == "cache" else nothing,
        score_tokens=zeros if spec.scores else nothing,
        lora_slots=zeros if spec.has_lora else nothing,
        tiles=tiles._replace(
            counts=np.array([0, 1, 0, 0, num_score_rows], np.int32), wide_start=zero, wide_len=one, wide_segment=zero
        ),
    )
