"""The options that shape the engine, for every verb that loads a model: fields of `EngineOptions`, explained.

A switch has an empty metavar because it takes no value, and a choice names its values in its help: spelled out as the
metavar they would leave the help no room.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from prefixwise.cli.flags import Flag, Verb, with_flags
from prefixwise.forward.backend import Warmup
from prefixwise.launch.options import EngineOptions
from prefixwise.plan.options import MaskOption

if TYPE_CHECKING:
    from prefixwise.engine.engine import ScoringEngine
    from prefixwise.engine.warmup import OnProgram

PANEL = "Model and engine"
BackendName = Literal["auto", "jax", "torch", "fake"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

ENGINE_FLAGS = {
    "model": Flag(
        str | None,
        "A folder, a .gguf file or a hub id like Qwen/Qwen3-0.6B; the embedded model when left out.",
        "MODEL",
    ),
    "backend": Flag(
        BackendName,
        "auto (JAX on TPUs and GPUs, PyTorch on CPUs), jax, torch, or fake (no model, for trials).",
        "NAME",
    ),
    "device": Flag(str, "auto, cpu, cuda, tpu, or one of many: cuda:1.", "NAME"),
    "dtype": Flag(DtypeName, "auto, float32, bfloat16 or float16.", "NAME"),
    "tp_size": Flag(int, "Devices that share every layer (JAX).", least=1),
    "dp_size": Flag(int, "Copies of the model, each on devices of its own (JAX).", least=1),
    "batch_invariant": Flag(
        bool, "An item's bits do not depend on the size of its batch, on devices where that costs speed.", ""
    ),
    "attention": Flag(
        str | None,
        "An attention implementation of JAX: hopper, pallas_gpu, pallas_tpu, xla or reference; the best that runs.",
        "NAME",
    ),
    "chunk_size": Flag(
        int | None,
        "Most items in one packed row or one forward; 0: no bound; chosen for you when left out.",
        least=0,
    ),
    "mask": Flag(MaskOption, f"How packed rows are masked: {', '.join(get_args(MaskOption))}.", "NAME"),
    "segment_fallback_threshold": Flag(
        int, "Mask auto: segment up to this many tokens in a packed row, then dense if it can.", least=0
    ),
    "token_budget": Flag(int | None, "Most tokens in one forward; chosen for the device when left out.", least=1),
    "delimiter_token_id": Flag(
        int | None, "A token between the query and every item; none when left out.", "ID", least=0
    ),
    "warmup": Flag(
        Warmup,
        "Compile all programs before scoring: full, fast (fewer, coarser sizes) or none "
        "(each when it is needed). PyTorch has none to compile.",
        "NAME",
    ),
    "compilation_cache_dir": Flag(
        str | None, "Where compiled programs are kept; a cache folder of yours on TPUs and GPUs.", "DIR"
    ),
    "weight_cache": Flag(
        bool,
        "Keep no dequantised weights of a .gguf file on disk for the next start.",
        "",
        name="--no-weight-cache",
        turns_off=True,
    ),
    "prefix_cache_bytes": Flag(int | None, "Memory for prefixes on each device; chosen when left out.", least=1),
}

# Of the verbs that rerank; for `score` it would mean nothing.
PROFILE_FLAG = Flag(
    str | None,
    "How documents become prompts: a profile's name (`prefixwise profiles` lists them) or a .toml file; "
    "by the model's name when left out.",
    "PROFILE",
)


def with_engine_options(verb: Verb) -> Verb:
    """Gives a verb the options above, as one argument `engine`."""
    return with_flags("engine", EngineOptions, ENGINE_FLAGS, panel=PANEL)(verb)


def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
    """Load the model and warm it up. It is never closed: the process ends with its only request."""
    from prefixwise.launch.loading import load_engine

    # A limit protects a server from its clients; here there are none.
    unlimited = replace(options, max_items_per_request=sys.maxsize, max_queued_tokens=sys.maxsize)
    return load_engine(unlimited, on_program)
