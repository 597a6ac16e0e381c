"""From options to a running engine: load checkpoint, tokenizer and backend, start the scheduler, warm up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from time import perf_counter
from typing import NamedTuple

from prefixwise.backends.load import load_backend
from prefixwise.contract.errors import BackendError, ModelLoadError, RequestError, TokenizerError
from prefixwise.contract.request import Algorithm
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import Backend, BackendOptions, Program
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.launch.options import EngineOptions
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.lora import read_lora_rank
from prefixwise.models.sources import embedded_model_path, open_checkpoint
from prefixwise.plan.algorithms import max_dense_len
from prefixwise.prompts.profile_choice import chat_failure, choose_profile, find_profile, fitting_profile
from prefixwise.prompts.rerank import RerankPrompts
from prefixwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("prefixwise")

MAX_COMPILERS = 16  # programs compiled at a time, if there are as many cores

OnProgram = Callable[[int, int, str], None]  # programs compiled, programs in all, the next one's title


def load_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
    """Load the model and, if the options say so, warm it up. A failure on the way frees the device's memory."""
    if options.node_rank:
        message = f"node_rank {options.node_rank} computes for rank 0 and scores nothing itself"
        raise BackendError(f"{message}: start it with prefixwise serve")
    checkpoint, config, tokenizer = load_frontend(options)
    chosen = config.profiles.default
    if options.profile is not None and chosen is not None and not chosen.can_rerank:
        log.warning("profile %s has no labels of its own: requests to rerank will be refused", chosen.name)
    backend = load_backend(checkpoint, _with_lora_rank(options))
    _log_quantization(checkpoint, backend)
    scheduler = Scheduler(backend, options.scheduler_options())
    with ExitStack() as on_failure:
        on_failure.callback(scheduler.close)  # also closes the backend
        engine = ScoringEngine(config, scheduler, tokenizer)
        for name, folder in options.lora_folders():
            _load_lora(engine, name, folder)
        if options.warmup != "none":
            warm_up(engine, on_program)
        on_failure.pop_all()
    return engine


def follow_rank_0(options: EngineOptions) -> None:
    """On a host with another rank: load this host's part of the model, and run the forwards of rank 0 until it ends.

    Raises BackendError where rank 0 is lost.
    """
    from prefixwise.backends.jax.lockstep import follow

    chosen = options.backend_options()
    follow(lambda: load_backend(open_checkpoint(options.model), chosen), chosen)


def _with_lora_rank(options: EngineOptions) -> BackendOptions:
    """The options of the backend, with room for the ranks of the adapters that are loaded at start."""
    chosen = options.backend_options()
    if options.max_lora_rank is not None:
        return chosen
    ranks = [read_lora_rank(folder) for _, folder in options.lora_folders()]
    return replace(chosen, max_lora_rank=max([chosen.max_lora_rank, *ranks]))


def _load_lora(engine: ScoringEngine, name: str, folder: str) -> None:
    """Raises ModelLoadError: at start an adapter is a part of the model."""
    try:
        engine.load_lora(name, folder)
    except RequestError as error:
        raise ModelLoadError(f"the LoRA adapter {name!r} cannot be loaded: {error}") from None


def _log_quantization(checkpoint: Checkpoint, backend: Backend) -> None:
    if checkpoint.quantization is None:
        return
    if backend.info.quantization is not None:
        title, computed = checkpoint.quantization.title, backend.info.quantization
        log.info("the checkpoint is %s: linear layers are computed in %s", title, computed)
        return
    dtype, of_activations = backend.info.dtype, checkpoint.quantization.of_activations
    activations = f"; its quantisation of activations is not used, they are {dtype}" if of_activations else ""
    log.info(
        "the checkpoint is %s: weights were dequantised to %s%s", checkpoint.quantization.title, dtype, activations
    )


class Frontend(NamedTuple):
    """What prepares requests for a model. No weights are read for it."""

    checkpoint: Checkpoint
    config: EngineConfig
    tokenizer: TextTokenizer | None


def load_frontend(options: EngineOptions) -> Frontend:
    """Read the model's configuration and tokenizer, and choose its profile."""
    # First, so that an unknown profile is an error before the model is loaded.
    profile = None if options.profile is None else find_profile(options.profile)
    checkpoint = open_checkpoint(options.model)
    tokenizer = read_tokenizer(checkpoint)
    if tokenizer is not None:
        chat_failure(tokenizer)  # renders the chat template, which takes a process: no request waits for it
    profiles = choose_profile(profile, checkpoint, tokenizer)
    if profile is not None and profile.can_rerank and tokenizer is not None:
        fitting = fitting_profile(profile, profiles.by_name, tokenizer)
        RerankPrompts(fitting, tokenizer, checkpoint.config)  # raises if profile and tokenizer do not fit
    stored_as = None if checkpoint.quantization is None else checkpoint.quantization.title
    config = options.engine_config(checkpoint.name, profiles, checkpoint.revision, stored_as)
    return Frontend(checkpoint, config, tokenizer)


def resolved_config(options: EngineOptions, engine: ScoringEngine) -> dict[str, object]:
    """The options with every `auto` resolved, and the sizes that follow from them, as plain JSON.

    It is printed at start and shown by `/server_info`, so that a run can be reproduced.
    """
    resolved = {
        "model": str(embedded_model_path() if options.model is None else options.model),
        "token_budget": engine.planner.options.token_budget,
        "served_names": [engine.config.model_name, *engine.config.served_names],
        "lora": list(options.lora),
        "model_name": engine.config.model_name,
        "revision": engine.config.revision,
        "checkpoint_quantization": engine.config.checkpoint_quantization,
        "profile": None if engine.config.profiles.default is None else engine.config.profiles.default.name,
        "profile_reason": engine.config.profiles.reason,
    }
    return {
        **asdict(options),
        **resolved,
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
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype or info.compute_dtype or info.dtype,
        "prefix_attention_dtype": info.prefix_attention_dtype or info.compute_dtype or info.dtype,
        "batch_invariant": info.batch_invariant,
        "max_loras": info.max_loras,
        "max_lora_rank": info.max_lora_rank,
        "compilation_cache_dir": info.compilation_cache_dir,
        "step_tokens": info.step_tokens,
        "step_seconds": info.step_seconds,
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
    """None for a model without a tokenizer: it scores token ids, and a request with text gets an error.

    Raises ModelLoadError where the tokenizer is damaged, or not this model's.
    """
    try:
        files = checkpoint.read_tokenizer_files()
    except TokenizerError as error:
        log.info("only token ids can be scored: %s", error)
        return None
    highest = max((*files.leading_ids, *files.trailing_ids), default=0)
    if highest >= checkpoint.config.vocab_size:
        raise ModelLoadError(
            f"{checkpoint.path}: the tokenizer puts the id {highest} around every text, "
            f"but the model has {checkpoint.config.vocab_size} tokens"
        )
    return TextTokenizer(files, checkpoint.config.max_context_len)


def warm_up(engine: ScoringEngine, on_program: OnProgram | None = None) -> int:
    """Compile all programs of the engine's backend before the first request, and run a few small requests.

    On a GPU sequences of packed and serial are left out unless `auto` may choose them. Returns how many programs there
    are. Raises BackendError if one of them cannot be compiled.
    """
    begin = perf_counter()
    scheduler, longest_dense = engine.scheduler, max_dense_len(engine.planner.options)
    has_sequences = engine.planner.may_make_sequences
    programs = scheduler.call(lambda: engine.backend.programs(max_dense_len=longest_dense, has_sequences=has_sequences))
    log.info("warm-up: %d programs to compile", len(programs))
    _compile(scheduler, programs, on_program)
    # In order, and after all are compiled: a compiler may time GEMMs on the device.
    for number, program in enumerate(programs):
        if on_program is not None and program.lower is None:
            on_program(number, len(programs), program.title)
        scheduler.call(program.prepare)
    scheduler.calibrate()
    _log_costs(scheduler)
    compiles = any(program.lower is not None for program in programs)
    _score_items(engine, has_sequences=has_sequences or not compiles)
    scheduler.call(engine.backend.end_warm_up)
    log.info("warm-up: ready after %.1f s", perf_counter() - begin)
    return len(programs)


def _compile(scheduler: Scheduler, programs: Sequence[Program], on_program: OnProgram | None) -> None:
    """Compile in parallel, begun in order. Processes that compile together may wait for each other's part of a program,
    so all of them must work on the first one that is not done."""

    def compile_one(program: Program) -> None:
        if program.lower is not None:
            scheduler.call(program.lower)()

    compilers = ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS), thread_name_prefix="prefixwise-compile")
    try:
        compiling = [compilers.submit(compile_one, program) for program in programs]
        for number, (program, done) in enumerate(zip(programs, compiling, strict=True)):
            if on_program is not None and program.lower is not None:
                on_program(number, len(programs), program.title)
            try:
                done.result()
            except Exception as error:
                raise BackendError(f"cannot compile the program {program.title!r}: {error}") from error
    finally:
        compilers.shutdown(cancel_futures=True)


def _log_costs(scheduler: Scheduler) -> None:
    stats = scheduler.stats()
    log.info(
        "%s costs: %.3g ms per forward, %.3g us per token, %.3g ns per query-key pair; a step has up to %d tokens",
        stats.cost_source,
        1e3 * stats.seconds_per_forward,
        1e6 * stats.seconds_per_token,
        1e9 * stats.seconds_per_pair,
        stats.max_step_tokens,
    )


def _score_items(engine: ScoringEngine, *, has_sequences: bool) -> None:
    """The first request is slow on the host, too. The last one is large enough to measure the token rate, which decides
    what is admitted (`engine/admission.py`)."""
    algorithms: tuple[Algorithm, ...] = ("serial", "packed", "prefill_extend")
    for algorithm in algorithms if has_sequences else algorithms[-1:]:
        engine.score(engine.tiny_request(algorithm))
    engine.score(engine.tiny_request(item_tokens=engine.scheduler.admission.turn_tokens))
