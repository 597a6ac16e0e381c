"""Which tiles, warps and stages PyTorch's CUDA attention is to have on this GPU: a sweep over its tunings.

Measured: microseconds of one kernel, from replays of a CUDA graph that holds four of them, for the heads of Qwen3-0.6B,
in the forward of a contract request (2000 + 500 x 20), of a small one (300 + 10 x 20) and of 24 such. Prefix attention
is in bfloat16 and in FP8 (`--prefix-attention-dtype fp8`); both kernels also write their result in FP8, as with
`--quantization fp8` ("to fp8").
The choices are data in `prefixwise/backends/torch/cuda/attention.py` (`prefix_tunings`, `self_attention_tuning`). The
last line is JSON.

    python -m benchmarks.tune_torch_kernels [--rounds 20]

On a CPU with TRITON_INTERPRET=1 and `--tiny` it runs small shapes without a clock, as a test of itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixwise.backends.torch.cuda.attention import (
    HOPPER_TUNING,
    PagedAttention,
    PrefixTuning,
    Rows,
    SelfAttentionTuning,
)
from prefixwise.backends.torch.cuda.inputs import ProgramSpec, capacities, flat, host_inputs, packing, unpack
from prefixwise.backends.torch.cuda.kv_cache import KeySource
from prefixwise.backends.torch.fp8 import round_to_fp8
from prefixwise.contract.ragged import Ragged
from prefixwise.engine.forward_batches import BlockRun, ItemRun, joined_batch
from prefixwise.forward.tiles import KEY_TILE
from prefixwise.plan.segments import SplitItems, lay_out_segments, plan_labels

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 16, 8, 128
KERNELS_IN_A_GRAPH = 4
SELF_ATTENTION_TUNINGS = [
    SelfAttentionTuning(*choice) for choice in product((16, 32), (2, 4), (1, 3), (16,), (None, 128))
]
PREFIX_TUNINGS = [
    HOPPER_TUNING,
    PrefixTuning(is_hopper=True, num_warps=4, num_keys=64, num_stages=3),
    PrefixTuning(),
    PrefixTuning(num_keys=64, num_stages=3),
    PrefixTuning(num_keys=64, num_stages=3, num_warps=4, programs_per_sm=2),
]


@dataclass(frozen=True)
class Geometry:
    """A request, or several of the same sizes with prefixes of their own."""

    name: str
    query_tokens: int
    items: int
    item_tokens: int
    requests: int = 1


@dataclass(frozen=True)
class Forward:
    """One layer's attention, ready to run."""

    rows: Rows
    source: KeySource
    tiles: Any

    def in_fp8(self) -> Forward:
        """With codes of the queries and of the prefix's keys."""
        queries = round_to_fp8(self.rows.queries[:, :NUM_HEADS]).contiguous()
        source = replace(self.source, keys=round_to_fp8(self.source.keys))
        return Forward(self.rows._replace(queries=queries), source, self.tiles)


Run = Callable[[PagedAttention, Forward], None]


def prepare(attention: PagedAttention, geometry: Geometry, device: torch.device) -> Forward:
    """A request's prefix is computed and cached in the forward that scores its items."""
    prefix, tails = np.zeros(geometry.query_tokens, np.int32), [[0] * geometry.item_tokens] * geometry.items
    shared = np.full(geometry.items, geometry.query_tokens, np.int64)
    segments = lay_out_segments(SplitItems(prefix, shared, Ragged.from_sequences(tails)), plan_labels(((0,),)))
    per_request = -(-geometry.query_tokens // KEY_TILE)
    num_blocks = geometry.requests * per_request
    items = [ItemRun(segments, 0, geometry.items, number) for number in range(geometry.requests)]
    blocks = [BlockRun(prefix, 0, per_request)] * geometry.requests
    batch = joined_batch(blocks, items, need_logsumexp=False)
    num_tokens = -(-batch.num_tokens // 256) * 256
    spec = ProgramSpec(num_tokens, "cache", scores=False)
    addresses = KEY_TILE * np.arange(num_blocks)
    new_pages = dict(zip(batch.cache_segments, addresses.tolist(), strict=True))
    inputs = host_inputs(batch, spec, attention.tile_sizes, np.split(addresses, geometry.requests), new_pages)
    layout = packing(capacities(spec, attention.tile_sizes, num_blocks))
    packed = np.zeros(layout.size, np.int32)
    layout.pack(flat(inputs), packed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float16)

    pages, arrays = num_blocks * KEY_TILE, unpack(layout, torch.from_numpy(packed).to(device))
    qkv, out = draw(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE), draw(num_tokens, NUM_HEADS, HEAD_SIZE)
    return Forward(
        Rows(qkv, out, torch.zeros(num_tokens, NUM_HEADS, device=device), arrays.positions),
        KeySource(draw(pages, NUM_KV_HEADS, HEAD_SIZE), draw(pages, NUM_KV_HEADS, HEAD_SIZE)),
        arrays.tiles,
    )


def microseconds(run: Callable[[], None], rounds: int, device: torch.device) -> float:
    """Of one run; on a CPU it is run and not timed."""
    run()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS_IN_A_GRAPH):
            run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * float(begin.elapsed_time(end)) / rounds / KERNELS_IN_A_GRAPH


def kernels(
    device: torch.device,
) -> Iterator[tuple[str, Any, PagedAttention, Callable[[PagedAttention, Forward], None]]]:
    """Kernel, tuning, attention with it, and how it is run."""

    def make(**tunings: Any) -> PagedAttention:
        sizes: dict[str, Any] = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE}
        return PagedAttention(**sizes, device=device, **tunings)

    for name, tuning in product(("self", "self to fp8"), SELF_ATTENTION_TUNINGS):
        yield (
            name,
            tuning,
            make(self_attention=tuning),
            lambda attention, on: attention.attend_self(on.rows, on.tiles),
        )
    for name, each in product(("prefix", "prefix fp8", "prefix to fp8"), PREFIX_TUNINGS):
        if device.type == "cuda" or not each.is_hopper:
            yield (
                name,
                each,
                make(prefix=each),
                lambda attention, on: attention.attend_prefix(on.rows, on.source, on.tiles),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a small shape, and one tuning of each kernel")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    geometries = [Geometry("contract", 2000, 500, 20), Geometry("small", 300, 10, 20)]
    geometries.append(Geometry("24 small", 300, 10, 20, requests=24))
    if options.tiny:
        geometries = [Geometry("tiny", 130, 2, 5, requests=2)]
    rows: list[dict[str, Any]] = []
    probed: set[str] = set()
    for kernel, tuning, attention, run in kernels(device):
        if options.tiny and kernel in probed:
            continue
        probed.add(kernel)
        row: dict[str, Any] = {"kernel": kernel, "tuning": str(tuning)}
        try:
            for geometry in geometries:
                forward = prepare(attention, geometry, device)
                if kernel == "prefix fp8":
                    forward = forward.in_fp8()
                if kernel.endswith("to fp8"):
                    forward = replace(forward, rows=forward.rows._replace(codes=round_to_fp8(forward.rows.out)))
                timed = microseconds(partial(run, attention, forward), options.rounds, device)
                row[geometry.name] = round(timed, 1)
        except Exception as error:  # a tuning that does not fit this GPU
            row["error"] = str(error).partition("\n")[0]
        rows.append(row)
        print(" ".join(str(value) for value in row.values()), flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "microseconds": rows}))


if __name__ == "__main__":
    main()
