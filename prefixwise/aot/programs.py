"""The programs behind a run's forwards: what each has to compute, and what the compiler says of it.

FLOPs and bytes are counted from the geometry of the forwards, because the compiler counts the loop over layers as one
round. They are lower bounds: padding is not counted, and every weight is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prefixwise.models.config import ModelConfig, layer_parameter_shapes

if TYPE_CHECKING:
    from prefixwise.backends.jax.aot import Chip, Compilation, RecordingBackend
    from prefixwise.backends.jax.inputs import ProgramSpec
    from prefixwise.backends.jax.programs import HeadSpec
    from prefixwise.forward.batch import ForwardBatch

OnProgram = Callable[[int, int, str], None]  # programs done, programs in all, title of the next one

_PROJECTIONS = ("q", "k", "v")
_AFTER_ATTENTION = ("o", "gate", "up", "down")


@dataclass(frozen=True)
class Work:
    """Work of all devices together; a multiplication and an addition are two FLOPs."""

    flops: int
    bytes_read: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes_read + other.bytes_read)


@dataclass(frozen=True)
class NeededProgram:
    """A program, how often the forwards start it, and the work of all its runs."""

    spec: ProgramSpec | HeadSpec
    runs: int
    work: Work

    @property
    def title(self) -> str:
        return self.spec.title

    @property
    def num_tokens(self) -> int:
        return self.spec.num_tokens or 0


@dataclass(frozen=True)
class ProgramReport:
    """One line of the table."""

    needed: NeededProgram
    compilation: Compilation
    # At the published rates, with GEMMs and HBM both at their best and no time for collectives: an estimate that no run
    # can beat. None where the rate of the dtype is not published.
    seconds_at_least: float | None


@dataclass(frozen=True)
class LargestProgram:
    """The largest program of a kind that compiles."""

    num_tokens: int  # 0: none compiles
    num_compiled: int  # programs that the search compiled
    reason: str | None  # why the next larger one does not compile; None: it is the largest that a server has


def needed_programs(backend: RecordingBackend, forwards: Sequence[ForwardBatch]) -> list[NeededProgram]:
    """Trunks in the order of their first forward, then the programs behind them."""
    trunks = [(batch, backend.spec(batch)) for batch in forwards]
    heads = [(batch, spec, runs) for batch in forwards for spec, runs in backend.head_runs(batch)]
    needed = [
        *(NeededProgram(spec, 1, trunk_work(backend, batch, spec)) for batch, spec in trunks),
        *(NeededProgram(spec, runs, head_work(backend, spec, len(batch.score_tokens))) for batch, spec, runs in heads),
    ]
    found: dict[ProgramSpec | HeadSpec, NeededProgram] = {}
    for each in needed:
        before = found.get(each.spec, NeededProgram(each.spec, 0, Work(0, 0)))
        found[each.spec] = NeededProgram(each.spec, before.runs + each.runs, before.work + each.work)
    return list(found.values())


def compile_programs(
    backend: RecordingBackend, chip: Chip, programs: Sequence[NeededProgram], on_program: OnProgram
) -> list[ProgramReport]:
    """Compile the programs, one after the other."""
    reports = []
    for number, needed in enumerate(programs):
        on_program(number, len(programs), needed.title)
        compilation = backend.compile(needed.spec)
        reports.append(ProgramReport(needed, compilation, seconds_at_least(backend, chip, needed.work)))
    return reports


def largest_program(
    compile_size: Callable[[int], Compilation], sizes: Sequence[int], on_size: Callable[[int], None]
) -> LargestProgram:
    """Search the ascending `sizes` (in tokens) by compiling. The largest comes first: it mostly fits."""
    compiled: dict[int, Compilation] = {}

    def fits(size: int) -> bool:
        if size not in compiled:
            on_size(size)
            compiled[size] = compile_size(size)
        return compiled[size].outcome == "compiles"

    below, above = -1, len(sizes)  # the largest that is known to fit, and the smallest that is known not to
    middle = len(sizes) - 1
    while above - below > 1:
        below, above = (middle, above) if fits(sizes[middle]) else (below, middle)
        middle = (below + above) // 2
    reason = compiled[sizes[above]].reason if above < len(sizes) else None
    return LargestProgram(sizes[below] if below >= 0 else 0, len(compiled), reason)


def seconds_at_least(backend: RecordingBackend, chip: Chip, work: Work) -> float | None:
    """The time of all runs on all chips of the mesh, at the published rates."""
    rate = chip.flops_per_second.get(backend.info.dtype)
    if rate is None:
        return None
    num_chips = backend.assembly.mesh.size
    num_readers = num_chips // backend.info.num_copies  # every copy of the model reads all weights
    return max(work.flops / (num_chips * rate), work.bytes_read / (num_readers * chip.bytes_per_second))


def trunk_work(backend: RecordingBackend, batch: ForwardBatch, spec: ProgramSpec) -> Work:
    """All layers up to the last one's attention: every weight and every cached prefix read once, a dense mask in each
    layer."""
    config = backend.config
    layers, before, after = (
        config.num_layers,
        _num_weights(config, _PROJECTIONS),
        _num_weights(config, _AFTER_ATTENTION),
    )
    linear = 2 * batch.num_tokens * (layers * before + (layers - 1) * _num_weights_of_a_token(config))
    attention = 4 * config.num_heads * config.head_size * _visible_pairs(batch) * layers
    cached = sum(block.num_tokens for prefix in batch.prefixes for block in prefix.blocks)
    numbers = layers * before + (layers - 1) * after + 2 * layers * config.num_kv_heads * config.head_size * cached
    mask = layers * batch.num_tokens * spec.dense_columns
    return Work(linear + attention, backend.itemsize * numbers + mask)


def head_work(backend: RecordingBackend, spec: HeadSpec, num_rows: int) -> Work:
    """For the scored rows: the last layer behind its attention, one tile of labels, or the whole vocabulary."""
    config = backend.config
    if spec.kind == "score":
        numbers = _num_weights(config, _AFTER_ATTENTION)
        return Work(2 * num_rows * _num_weights_of_a_token(config), backend.itemsize * numbers)
    numbers = (backend.label_tile if spec.kind == "labels" else config.num_head_rows) * config.model_size
    return Work(2 * num_rows * numbers, backend.itemsize * numbers)


def _num_weights(config: ModelConfig, names: tuple[str, ...]) -> int:
    shapes = layer_parameter_shapes(config)
    return sum(int(np.prod(shapes[name])) for name in names)


def _num_weights_of_a_token(config: ModelConfig) -> int:
    """The weights behind attention that one token multiplies: of experts only its own."""
    output, *mlp = _AFTER_ATTENTION
    dense, used = replace(config, experts=None), 1 if config.experts is None else config.experts.experts_per_token
    return _num_weights(dense, (output,)) + used * _num_weights(dense, tuple(mlp))


def _visible_pairs(batch: ForwardBatch) -> int:
    """How many pairs of a query and a key the attention computes."""
    lens = np.diff(batch.segment_starts)
    return int((lens * batch.read_lens + lens * (lens + 1) // 2).sum())
