"""The options of a sweep over the server's chunk sizes, for `smoke` and `matrix`."""

from __future__ import annotations

from prefixwise.bench.remote.spec import SweepSpec
from prefixwise.cli.engine_options import BackendName, DtypeName
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.harness_common import integers
from prefixwise.contract.request import Algorithm
from prefixwise.plan.options import MaskOption

_FLAGS = {
    "model": Flag(str, "On the target: a folder, a .gguf file, a hub id, or embedded.", "MODEL"),
    "backend": Flag(BackendName, "Of the server: auto, jax or torch.", "NAME"),
    "dtype": Flag(DtypeName, "Of the server: auto, float32, bfloat16 or float16.", "NAME"),
    "algorithm": Flag(Algorithm, "Of the server; only packed rows have masks.", "NAME"),
    "mask": Flag(
        MaskOption,
        "Of the server: dense, segment or auto.",
        "NAME",
        name="--multi-item-mask-impl",
        environment_variable="MULTI_ITEM_MASK_IMPL",
    ),
    "segment_fallback_threshold": Flag(int, "Of the server.", least=0, name="--multi-item-segment-fallback-threshold"),
    "query_tokens": Flag(int, "Tokens of the query.", least=1),
    "num_items": Flag(int, "Items of the request.", least=1),
    "item_tokens": Flag(int, "Tokens of an item.", least=1),
    "warmup_runs": Flag(int, "Runs before those that count.", least=0),
    "timed_runs": Flag(int, "Runs that count, for each chunk size.", least=1),
    "timeout_sec": Flag(float, "For one request.", "SECONDS", least=0.001),
    "start_timeout_sec": Flag(float, "For a server to be ready.", "SECONDS", least=1),
    "port": Flag(int, "Of the server on the target; 0: any that is free.", least=0),
    "hardware": Flag(str, "What the artifact calls the machine; as the server tells it when left out.", "NAME"),
}

with_sweep_options = with_flags("sweep", SweepSpec, _FLAGS, panel="Sweep")


def chunk_sizes_of(text: str) -> tuple[int, ...]:
    """Raises CommandError."""
    sizes = integers(text, "--chunk-sizes")
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise CommandError(f"--chunk-sizes must be 1 or more, each once, got {text!r}", status=MISUSED)
    return tuple(sizes)
