"""From options to an engine that is ready: checkpoint, backend, scheduler, tokenizer, warm-up."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict

from prefixwise.backends.load import load_backend
from prefixwise.contract.errors import TokenizerError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.scheduler import Scheduler
from prefixwise.engine.warmup import OnProgram, warm_up
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.launch.options import EngineOptions
from prefixwise.models.checkpoint import Checkpoint, open_checkpoint
from prefixwise.models.embedded import embedded_model_path
from prefixwise.prompts.profile_choice import choose_profile, fitting_profile
from prefixwise.prompts.profile_files import find_profile
from prefixwise.prompts.rerank import RerankPrompts
from prefixwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("prefixwise")


def load_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
    """Load the model, and warm it up where that is asked for. What fails half-way gives the device's memory back."""
    profile = None if options.profile is None else find_profile(options.profile)  # before the wait for the model
    checkpoint = open_checkpoint(options.model)
    tokenizer = read_tokenizer(checkpoint)
    profiles = choose_profile(profile, checkpoint, tokenizer)
    if profile is not None and profile.can_rerank and tokenizer is not None:
        fitting = fitting_profile(profile, profiles.by_name, tokenizer)
        RerankPrompts(fitting, tokenizer, checkpoint.config)  # raises where the two do not fit
    elif profile is not None and not profile.can_rerank:
        log.warning("profile %s has no labels of its own: requests to rerank will be refused", profile.name)
    scheduler = Scheduler(load_backend(checkpoint, options.backend_options()), options.scheduler_options())
    with ExitStack() as on_failure:
        on_failure.callback(scheduler.close)  # and its backend
        engine = ScoringEngine(options.engine_config(checkpoint.name, profiles), scheduler, tokenizer)
        if options.warmup != "none":
            warm_up(engine, on_program)
        on_failure.pop_all()
    return engine


def resolved_config(options: EngineOptions, engine: ScoringEngine) -> dict[str, object]:
    """The options with every `auto` settled, and the sizes that follow from them, as plain JSON.

    A run can be repeated from it: it is printed at start, and `/server_info` shows it.
    """
    settled = {
        "model": str(embedded_model_path() if options.model is None else options.model),
        "token_budget": engine.planner.options.token_budget,
        "served_names": [engine.config.model_name, *engine.config.served_names],
        "model_name": engine.config.model_name,
        "profile": None if engine.config.profiles.default is None else engine.config.profiles.default.name,
        "profile_reason": engine.config.profiles.reason,
    }
    return {
        **asdict(options),
        **settled,
        **_of_backend(engine.backend),
        **_of_scheduler(engine.scheduler),
    }


def _of_backend(backend: Backend) -> dict[str, object]:
    info = backend.info
    return {
        "backend": info.name,
        "device": info.device,
        "device_kind": info.device_kind,
        "dtype": info.dtype,
        "compute_dtype": info.compute_dtype or info.dtype,
        "attention": info.attention,
        "compilation_cache_dir": info.compilation_cache_dir,
        "step_tokens": info.step_tokens,
        "token_multiple": info.token_multiple,
        "token_buckets": list(info.token_buckets),
        "algorithms_bit_equal": info.algorithms_bit_equal,
        "max_context_len": backend.config.max_context_len,
        "vocab_size": backend.config.vocab_size,
    }


def _of_scheduler(scheduler: Scheduler) -> dict[str, object]:
    num_blocks, block_bytes = scheduler.cache.capacity, scheduler.backend.info.kv_block_bytes
    return {
        "prefix_cache": scheduler.options.prefix_cache,
        "prefix_cache_blocks": num_blocks,
        "prefix_cache_tokens": num_blocks * KV_BLOCK_SIZE,
        "prefix_cache_bytes": num_blocks * block_bytes,
        "chunked_prefill_size": scheduler.options.chunked_prefill_size,
        "max_queued_tokens": scheduler.admission.max_tokens,
    }


def read_tokenizer(checkpoint: Checkpoint) -> TextTokenizer | None:
    """None for a model without one: token ids can still be scored, and text gets an error that says so."""
    try:
        return TextTokenizer(checkpoint.read_tokenizer_files())
    except TokenizerError as error:
        log.info("only token ids can be scored: %s", error)
        return None
