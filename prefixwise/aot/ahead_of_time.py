"""A request that nobody sent, to a model that is not there, on TPUs that are not there: which programs would it run?

The engine plans it and cuts it into steps as it would any other; a backend that computes nothing remembers them. Their
programs are then compiled for the slice. jax is imported on the way, so `prepare_compiler` comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prefixwise.aot.options import AotOptions
from prefixwise.contract.ragged import Ragged
from prefixwise.contract.request import ScoreRequest
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.scheduler import Scheduler
from prefixwise.models.config import ModelConfig
from prefixwise.models.known_shapes import describe_model
from prefixwise.plan.options import DENSE_MAX_ROW_LEN
from prefixwise.prompts.profile_choice import profile_of_any_model

if TYPE_CHECKING:
    from prefixwise.backends.jax.aot.largest import LargestProgram
    from prefixwise.backends.jax.aot.recorder import RecordingBackend
    from prefixwise.backends.jax.aot.report import NeededProgram, OnProgram, ProgramReport
    from prefixwise.backends.jax.aot.topology import Slice
    from prefixwise.forward.batch import ForwardBatch

_NO_BOUND = 1 << 60


@dataclass(frozen=True, eq=False)
class AotRun:
    """A request's forwards, and the backend that they were for."""

    options: AotOptions
    config: ModelConfig
    slice: Slice
    backend: RecordingBackend
    algorithm: str  # that was chosen
    forwards: tuple[ForwardBatch, ...]

    def programs(self) -> list[NeededProgram]:
        from prefixwise.backends.jax.aot.report import needed_programs

        return needed_programs(self.backend, self.forwards)

    def compile(self, programs: list[NeededProgram], on_program: OnProgram) -> list[ProgramReport]:
        """One after the other; what fails is in the report."""
        from prefixwise.backends.jax.aot.report import report_programs

        return report_programs(self.backend, self.slice.chip, programs, on_program)


@dataclass(frozen=True)
class LargestChunk:
    """The most items that one forward can hold."""

    items: int
    program: LargestProgram


def record(options: AotOptions) -> AotRun:
    """Plan the request. Raises BackendError where a compiler or a topology is missing, ModelLoadError, RequestError."""
    from prefixwise.backends.jax.aot.environment import prepare_compiler

    prepare_compiler()
    from prefixwise.backends.jax.aot.recorder import RecordingBackend
    from prefixwise.backends.jax.aot.topology import describe_slice

    config, slice_ = describe_model(options.model), describe_slice(options.topology)
    engine_options = options.engine_options(slice_.num_chips)
    backend = RecordingBackend(config, engine_options.backend_options(), slice_)
    scheduler = Scheduler(backend, engine_options.scheduler_options())
    try:
        profiles = profile_of_any_model()
        engine = ScoringEngine(engine_options.engine_config(options.model, profiles), scheduler, None)
        prepared = engine.prepare(_request(options))
        engine.finish(prepared, engine.run(prepared))
    finally:
        scheduler.close()
    assert prepared.plan is not None, "a request with items"
    return AotRun(options, config, slice_, backend, prepared.plan.algorithm, tuple(backend.forwards))


def find_largest_chunk(run: AotRun, on_program: OnProgram) -> LargestChunk:
    """Among the sizes of programs that the server has, with the run's kind of program that scores the most tokens."""
    from prefixwise.backends.jax.aot.largest import largest_program

    scored = [run.backend.spec(batch) for batch in run.forwards if len(batch.score_tokens)]
    kind = max(scored, key=lambda spec: spec.num_tokens)
    most = DENSE_MAX_ROW_LEN if kind.dense_columns else _NO_BOUND
    sizes = [size for size in run.backend.info.token_buckets if _items_in(run, size) and size <= most]
    tried = 0

    def on_size(size: int) -> None:
        nonlocal tried
        on_program(tried, tried + 1, f"{replace(kind, num_tokens=size, dense_columns=0).title}: the largest chunk")
        tried += 1

    found = largest_program(run.backend.assembly.programs, kind, sizes, on_size)
    return LargestChunk(_items_in(run, found.num_tokens), found)


def _items_in(run: AotRun, num_tokens: int) -> int:
    """How many items a forward of so many tokens has, if it is one chunk."""
    prefix, item = run.options.prefix_tokens, run.options.item_tokens
    if run.algorithm == "serial":
        return num_tokens // (prefix + item)
    return max(0, num_tokens - (prefix if run.algorithm == "packed" else 0)) // item


def _request(options: AotOptions) -> ScoreRequest:
    """Token 0 throughout: no shape depends on what the tokens are."""
    items = Ragged(
        np.zeros(options.items * options.item_tokens, np.int32),
        np.arange(options.items + 1, dtype=np.int64) * options.item_tokens,
    )
    return ScoreRequest(np.zeros(options.prefix_tokens, np.int32), items, label_token_ids=((0,), (1,)))
