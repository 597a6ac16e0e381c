"""The model's own four GEMMs on all cores, through each linear layer that torch has; the fastest counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from benchmarks.cpu.cases import Role
from benchmarks.cpu.peer import Peer, Round
from benchmarks.gemm_rate import model_products
from prefixwise.backends.torch.devices import resolve_dtype

Product = Callable[[torch.Tensor], torch.Tensor]


class Products(Peer):
    """Two kinds of linear layers, over each number of rows."""

    def __init__(self, role: Role) -> None:
        self._scale = role.scale
        self._shapes = model_products(self._scale.model)
        self._dtype = resolve_dtype("auto", torch.device("cpu"))
        torch.manual_seed(0)
        weights = [torch.randn(o, i).to(self._dtype) for o, i in self._shapes]
        self._kinds: dict[str, list[Product]] = {"linear": [_linear(weight) for weight in weights]}
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            self._kinds["prepacked"] = [_prepacked(weight) for weight in weights]
        most = max(self._scale.gemm_rows)
        self._inputs = [torch.randn(most, i).to(self._dtype) for _, i in self._shapes]

    def prepare(self) -> dict[str, Any]:
        tried = {name: self._time(*choice).rate for name, choice in self._choices().items()}
        tried = {name: self._time(*choice).rate for name, choice in self._choices().items()}
        return {
            "versions": {"torch": torch.__version__},
            "settings": {
                "dtype": str(self._dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count(),
            },
            "tflops_by_kind": {name: round(rate / 1e12, 3) for name, rate in tried.items()},
        }

    def run(self, seed: int) -> Round:
        """Each of them once; the fastest is the round."""
        return max((self._time(*choice) for choice in self._choices().values()), key=lambda each: each.rate)

    def _choices(self) -> dict[str, tuple[str, int]]:
        return {f"{kind}, {rows} rows": (kind, rows) for kind in self._kinds for rows in self._scale.gemm_rows}

    def _time(self, kind: str, rows: int) -> Round:
        """As many rows in all, whatever the size of a product."""
        repeats = self._scale.gemm_repeats * max(1, max(self._scale.gemm_rows) // rows)
        pairs = [(product, x[:rows]) for product, x in zip(self._kinds[kind], self._inputs, strict=True)]
        begin = perf_counter()
        with torch.inference_mode():
            for _ in range(repeats):
                for product, x in pairs:
                    product(x)
        flops = repeats * sum(2 * rows * o * i for o, i in self._shapes)
        return Round(flops, perf_counter() - begin)


def _linear(weight: torch.Tensor) -> Product:
    return lambda x: torch.nn.functional.linear(x, weight)


def _prepacked(weight: torch.Tensor) -> Product:
    """oneDNN's, over weights in the order that its kernels read them."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
