"""The programs of a model: for every `ProgramSpec` a CUDA graph of the trunk, recorded when it is first asked for.

The host needs longer to launch a layer's kernels than the device to run them, unless there are thousands of tokens. A
graph is launched once. It reads its integers from one buffer and works in one workspace, which all graphs share:
forwards run in the order in which they are started.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from prefixwise.backends.torch.cuda.inputs import ForwardInputs, ProgramSpec, capacities, flat, packing, unpack
from prefixwise.backends.torch.cuda.trunk import Trunk
from prefixwise.backends.torch.cuda.uploads import Uploads
from prefixwise.backends.torch.cuda.workspace import Buffers, Workspace
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.buckets import Buckets
from prefixwise.forward.packing import Packing


class Programs:
    """Sizes that are not among the buckets run, too, but are not recorded."""

    def __init__(self, trunk: Trunk, buckets: Sequence[int], max_pool_blocks: int, *, records: bool = True) -> None:
        self._trunk, self._buckets, self._max_pool_blocks = trunk, Buckets(tuple(buckets)), max_pool_blocks
        self._records = records
        self._device = trunk.weights.embedding.device
        self._dtype = trunk.weights.embedding.dtype
        self._workspace = Workspace(trunk.config, self._buckets.largest, self._dtype, self._device)
        self._uploads = Uploads(self._largest_input(), self._device)
        self._packings: dict[ProgramSpec, Packing] = {}
        self._graphs: dict[ProgramSpec, torch.cuda.CUDAGraph] = {}
        # Recorded on, never run on.
        self._stream = torch.cuda.Stream(self._device) if records else None  # type: ignore[no-untyped-call]
        self._memory_pool = torch.cuda.graph_pool_handle() if records else None

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def bucket(self, num_tokens: int) -> int:
        """What a forward is padded to; beyond the largest bucket a multiple of the smallest."""
        return self._buckets.fit(num_tokens)

    def run(self, spec: ProgramSpec, inputs: ForwardInputs[Int32Array]) -> tuple[ForwardInputs[Tensor], Buffers]:
        """Queue a forward. What comes back is overwritten by the next one, in the stream's order."""
        places = self._packing(spec)
        if spec.num_tokens > self._buckets.largest:
            uploads = Uploads(places.size, self._device)
            buffers = Workspace(self._trunk.config, spec.num_tokens, self._dtype, self._device).buffers(spec.num_tokens)
        else:
            uploads, buffers = self._uploads, self._workspace.buffers(spec.num_tokens)
        on_device = unpack(places, uploads.send(places.size, lambda target: places.pack(flat(inputs), target)))
        if not self._records or spec.num_tokens > self._buckets.largest:
            self._trunk(spec, on_device, buffers)
        else:
            if spec not in self._graphs:
                self._graphs[spec] = self._record(spec, on_device, buffers)
            self._graphs[spec].replay()
        return on_device, buffers

    def _record(self, spec: ProgramSpec, inputs: ForwardInputs[Tensor], buffers: Buffers) -> torch.cuda.CUDAGraph:
        """Run it once, so that all kernels are compiled and loaded, and then record it."""
        self._trunk(spec, inputs, buffers)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory_pool, capture_error_mode="thread_local")
            try:
                self._trunk(spec, inputs, buffers)
            except BaseException:
                with suppress(Exception):  # it was ended by the failure, which is what is to be told
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _packing(self, spec: ProgramSpec) -> Packing:
        if spec not in self._packings:
            lens = capacities(spec, self._trunk.attention.tile_sizes, self._max_pool_blocks)
            self._packings[spec] = packing(lens)
        return self._packings[spec]

    def _largest_input(self) -> int:
        largest = self._buckets.largest
        sizes = self._trunk.attention.tile_sizes
        specs = (ProgramSpec(largest, "batch", scores=True), ProgramSpec(largest, "pool", scores=True))
        return max(packing(capacities(spec, sizes, self._max_pool_blocks)).size for spec in specs)
