"""Plan a request for TPUs that are not attached, and list the programs that it would run.

The engine plans the request and cuts it into steps as it would any other. A backend that computes nothing records the
forwards. Their programs are then compiled for the slice. jax is imported on the way, so `prepare_compiler` comes first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from prefixwise.aot.options import AotOptions
from prefixwise.aot.programs import (
    LargestProgram,
    NeededProgram,
    OnProgram,
    ProgramReport,
    compile_programs,
    largest_program,
    needed_programs,
)
from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import Ragged
from prefixwise.contract.request import ScoreRequest
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.likelihoods import Likelihoods
from prefixwise.engine.scheduler import Scheduler
from prefixwise.host import install_command
from prefixwise.models.config import ModelConfig
from prefixwise.models.sources import describe_model
from prefixwise.plan.algorithms import DENSE_MAX_SEQUENCE_LEN
from prefixwise.plan.likelihoods import TokenSequence
from prefixwise.prompts.profile_choice import profile_of_any_model

if TYPE_CHECKING:
    from prefixwise.backends.jax.aot import RecordingBackend, Slice
    from prefixwise.forward.batch import ForwardBatch

_NO_BOUND = 1 << 60
# The compiler for TPUs is libtpu, which must not look for a TPU. jax stays on the CPU.
_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # by default one process per machine may load it, since it owns the TPU
    "TPU_STDERR_LOG_LEVEL": "3",  # failures are in the report
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def missing_packages() -> list[str]:
    """The packages that compiling for TPUs needs and that are not installed."""
    return [name for name in ("jax", "libtpu") if find_spec(name) is None]


def prepare_compiler() -> None:
    """Set this process up to compile for TPUs; it cannot use a TPU afterwards. Must be called before jax is imported.

    Raises BackendError where a package is missing.
    """
    missing = missing_packages()
    if missing:
        raise BackendError(
            f"compiling for TPUs needs {' and '.join(missing)}; install it with: {install_command('tpu-aot')}"
        )
    os.environ.update(_VARIABLES)


@dataclass(frozen=True, eq=False)
class AotRun:
    """A request's forwards, and the backend that recorded them."""

    options: AotOptions
    config: ModelConfig
    slice: Slice
    backend: RecordingBackend
    algorithm: str  # the one that the plan chose
    forwards: tuple[ForwardBatch, ...]

    def programs(self) -> list[NeededProgram]:
        return needed_programs(self.backend, self.forwards)

    def compile(self, programs: list[NeededProgram], on_program: OnProgram) -> list[ProgramReport]:
        """Compile the programs, one after the other. A failure is part of the report."""
        return compile_programs(self.backend, self.slice.chip, programs, on_program)


@dataclass(frozen=True)
class LargestChunk:
    """The most items that one forward can hold."""

    items: int
    program: LargestProgram


def record(options: AotOptions) -> AotRun:
    """Plan the request and record its forwards.

    Raises BackendError where a compiler or a topology is missing, ModelLoadError, RequestError.
    """
    prepare_compiler()
    from prefixwise.backends.jax.aot import RecordingBackend, describe_slice

    config, slice_ = describe_model(options.model), describe_slice(options.topology)
    engine_options = options.engine_options(slice_.num_chips)
    backend = RecordingBackend(config, engine_options.backend_options(), slice_)
    scheduler = Scheduler(backend, engine_options.scheduler_options())
    try:
        profiles = profile_of_any_model()
        engine = ScoringEngine(engine_options.engine_config(options.model, profiles), scheduler, None)
        algorithm = _run_request(engine, options)
    finally:
        scheduler.close()
    return AotRun(options, config, slice_, backend, algorithm, tuple(backend.forwards))


def _run_request(engine: ScoringEngine, options: AotOptions) -> str:
    """The algorithm that was chosen."""
    if options.logprobs is not None:
        tokens = np.arange(options.items * options.item_tokens, dtype=np.int32) % engine.backend.config.vocab_size
        prefix = np.zeros(options.prefix_tokens, np.int32)
        sequences = [np.concatenate([prefix, item]) for item in tokens.reshape(options.items, -1)]
        Likelihoods(engine).read([TokenSequence(each, len(prefix)) for each in sequences], top_k=options.logprobs)
        return "prefill_extend"
    prepared = engine.prepare(_request(options))
    engine.finish(prepared, engine.run(prepared))
    assert prepared.plan is not None, "a request with items"
    return prepared.plan.algorithm


def find_largest_chunk(run: AotRun, on_program: OnProgram) -> LargestChunk:
    """Search the server's token buckets for the largest chunk, with the kind of program that scores the most tokens."""
    from prefixwise.backends.jax.aot import resized

    scored = [run.backend.spec(batch) for batch in run.forwards if len(batch.score_tokens)]
    kind = max(scored, key=lambda spec: spec.num_tokens)
    longest = DENSE_MAX_SEQUENCE_LEN if kind.dense_columns else _NO_BOUND
    sizes = [size for size in run.backend.info.token_buckets if _items_in(run, size) and size <= longest]
    num_compiled = 0

    def on_size(size: int) -> None:
        nonlocal num_compiled
        title = replace(kind, num_tokens=size, dense_columns=0).title
        on_program(num_compiled, num_compiled + 1, f"{title}: the largest chunk")
        num_compiled += 1

    found = largest_program(lambda size: run.backend.compile(resized(kind, size)), sizes, on_size)
    return LargestChunk(_items_in(run, found.num_tokens), found)


def _items_in(run: AotRun, num_tokens: int) -> int:
    """How many items a forward of so many tokens holds, if it is one chunk."""
    prefix, item = run.options.prefix_tokens, run.options.item_tokens
    if run.algorithm == "serial":
        return num_tokens // (prefix + item)
    return max(0, num_tokens - (prefix if run.algorithm == "packed" else 0)) // item


def _request(options: AotOptions) -> ScoreRequest:
    """Token 0 throughout: no shape depends on the tokens themselves."""
    items = Ragged(
        np.zeros(options.items * options.item_tokens, np.int32),
        np.arange(options.items + 1, dtype=np.int64) * options.item_tokens,
    )
    return ScoreRequest(np.zeros(options.prefix_tokens, np.int32), items, label_token_ids=((0,), (1,)))
