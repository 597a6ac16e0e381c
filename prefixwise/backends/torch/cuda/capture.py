"""Capturing CUDA graphs: what takes the host many launches becomes one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Capture:
    """Captures programs. Their graphs share memory: they are replayed one after the other, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # for capture, never for replay
        self._memory_pool = torch.cuda.graph_pool_handle()

    def __call__(self, program: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Run the program once, so that all kernels are compiled and loaded, and then capture it. Every replay
        overwrites the tensors that it returns."""
        program()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory_pool, capture_error_mode="thread_local")
            try:
                result = program()
            except BaseException:
                with suppress(Exception):  # the failure ended the capture, and is the error to report
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, result


class CapturedRows:
    """A function of rows, each by itself, for up to `num_rows` of them. The next call overwrites what it returns."""

    def __init__(self, capture: Capture, function: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        """`rows`: zeros, as many as there may be."""
        self._rows = rows
        self._graph, self._result = capture(lambda: function(rows))

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def __call__(self, rows: Tensor) -> Tensor:
        self._rows[: len(rows)].copy_(rows)
        self._graph.replay()
        return self._result[: len(rows)]
