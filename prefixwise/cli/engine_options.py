"""The engine's options, for every verb that loads a model: fields of `EngineOptions`.

A switch has an empty metavar because it takes no value. A choice lists its values in its help text: as a metavar they
would leave no room for the help.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from prefixwise.cli.flags import Flag, Verb, with_flags
from prefixwise.forward.backend import KVCacheDtypeName, PrefixAttentionDtypeName, QuantizationName, Warmup
from prefixwise.launch.options import EngineOptions
from prefixwise.plan.algorithms import MaskOption

if TYPE_CHECKING:
    from prefixwise.engine.engine import ScoringEngine
    from prefixwise.launch.loading import OnProgram

log = logging.getLogger("prefixwise")

PANEL = "Model and engine"
BackendName = Literal["auto", "jax", "torch", "fake"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

ENGINE_FLAGS = {
    "model": Flag(
        str | None,
        "A folder, a .gguf file or a hub id like Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION; default: the embedded "
        "model.",
        "MODEL",
    ),
    "backend": Flag(
        BackendName,
        "auto (PyTorch on CPUs and one GPU, JAX on TPUs and several devices), jax, torch, or fake (for tests).",
        "NAME",
    ),
    "device": Flag(str, "auto, cpu, cuda, tpu, or one device: cuda:1.", "NAME"),
    "dtype": Flag(DtypeName, "auto, float32, bfloat16 or float16.", "NAME"),
    "tp_size": Flag(int, "Tensor parallelism: devices that share every layer (JAX).", least=1),
    "dp_size": Flag(int, "Data parallelism: copies of the model, each on its own devices (JAX).", least=1),
    "batch_invariant": Flag(
        bool | None,
        "Make an item's bits independent of its batch size; "
        "default: where that costs nothing (CPUs, GPUs in half precision).",
        "",
        name="--batch-invariant/--no-batch-invariant",
    ),
    "quantization": Flag(
        QuantizationName | None,
        "fp8: linear layers in FP8, quantised while they are loaded (NVIDIA GPUs); default: the dtype.",
        "NAME",
    ),
    "kv_cache_dtype": Flag(
        KVCacheDtypeName,
        "auto, or fp8 (fp8_e4m3): the KV cache in FP8, which holds twice as many prefixes (PyTorch on GPUs).",
        "NAME",
    ),
    "prefix_attention_dtype": Flag(
        PrefixAttentionDtypeName,
        "auto, or fp8: queries and the keys of prefixes are multiplied in FP8 (PyTorch on GPUs).",
        "NAME",
    ),
    "attention": Flag(
        str | None,
        "JAX's attention: hopper, pallas_gpu, pallas_tpu, xla or reference; default: the fastest that runs.",
        "NAME",
    ),
    "chunk_size": Flag(
        int | None,
        "Maximum items in one packed sequence or one forward; 0: no limit; default: chosen automatically.",
        least=0,
    ),
    "mask": Flag(MaskOption, f"The mask of packed sequences: {', '.join(get_args(MaskOption))}.", "NAME"),
    "segment_fallback_threshold": Flag(
        int, "With mask auto: segment up to this many tokens in a packed sequence, then dense if it fits.", least=0
    ),
    "token_budget": Flag(int | None, "Maximum tokens in one forward; default: chosen for the device.", least=1),
    "delimiter_token_id": Flag(int | None, "A token between the query and every item; default: none.", "ID", least=0),
    "warmup": Flag(
        Warmup,
        "Compile programs before scoring: full (all), fast (fewer, coarser sizes) or none "
        "(on first use). PyTorch compiles none.",
        "NAME",
    ),
    "compilation_cache_dir": Flag(
        str | None, "The folder of the compilation cache; default: in the user's cache folder, on TPUs and GPUs.", "DIR"
    ),
    "weight_cache": Flag(
        bool,
        "Do not cache the dequantized weights of a .gguf file on disk for the next start.",
        "",
        name="--no-weight-cache",
        turns_off=True,
    ),
    "prefix_cache_bytes": Flag(
        int | None, "Memory of the KV cache on each device; default: chosen automatically.", least=1
    ),
}

# For the verbs that rerank; `score` has no profile.
PROFILE_FLAG = Flag(
    str | None,
    "How documents become prompts: a profile's name (`prefixwise profiles` lists them) or a .toml file; "
    "default: by the model's name.",
    "PROFILE",
)


def with_engine_options(verb: Verb) -> Verb:
    """Give a verb the options above as one argument `engine`."""
    return with_flags("engine", EngineOptions, ENGINE_FLAGS, panel=PANEL)(verb)


def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
    """Load the model and warm it up."""
    from prefixwise.launch.loading import load_engine

    # The limits protect a server from its clients; a command has none.
    unlimited = replace(options, max_items_per_request=sys.maxsize, max_queued_tokens=sys.maxsize)
    return load_engine(unlimited, on_program)


def open_engine_to_serve(options: EngineOptions, on_program: OnProgram) -> ScoringEngine:
    """Logs a warning if rerank requests must name a profile."""
    from prefixwise.launch.loading import load_engine
    from prefixwise.prompts.profile_choice import needed_profile

    engine = load_engine(options, on_program)
    needed = needed_profile(engine.config.profiles)
    if needed is not None:
        log.warning("rerank requests that name no profile are refused: %s", needed)
    return engine
