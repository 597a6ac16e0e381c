"""The programs behind some forwards: each compiled once, with what it needs and what its runs cost at the least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prefixwise.backends.jax.aot.chips import Chip
from prefixwise.backends.jax.aot.compiling import Compilation, compile_program
from prefixwise.backends.jax.aot.recorder import RecordingBackend
from prefixwise.backends.jax.aot.work import Work, labels_work, normalizers_work, score_work, trunk_work
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.programs import HeadSpec
from prefixwise.forward.batch import ForwardBatch

OnProgram = Callable[[int, int, str], None]  # done, in all, what comes next


@dataclass(frozen=True)
class NeededProgram:
    """A program, how often forwards start it, and what they have to do in it."""

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
    # At the published rates, products and HBM both at their best, and nothing said between chips: an estimate, which no
    # run can beat. None where the rate of the dtype is not published.
    seconds_at_least: float | None


def needed_programs(backend: RecordingBackend, forwards: Sequence[ForwardBatch]) -> list[NeededProgram]:
    """Trunks in the order of their first forward, then what is behind them."""
    found: dict[ProgramSpec | HeadSpec, NeededProgram] = {}
    behind: list[NeededProgram] = []
    for batch in forwards:
        spec = backend.spec(batch)
        _count(found, NeededProgram(spec, 1, trunk_work(backend.config, batch, spec, backend.itemsize)))
        behind += _behind(backend, batch, spec)
    for needed in behind:
        _count(found, needed)
    return list(found.values())


def _behind(backend: RecordingBackend, batch: ForwardBatch, spec: ProgramSpec) -> Iterator[NeededProgram]:
    """Score, labels and normalizers are started for every block of scored rows."""
    rows, config, itemsize = len(batch.score_tokens), backend.config, backend.itemsize
    if not rows:
        return
    runs = backend.num_score_blocks(batch)
    yield NeededProgram(HeadSpec("score", spec.num_tokens), runs, score_work(config, rows, itemsize))
    yield NeededProgram(HeadSpec("labels"), runs, labels_work(config, rows, itemsize))
    if batch.need_logsumexp:
        yield NeededProgram(HeadSpec("normalizers"), runs, normalizers_work(config, rows, itemsize))


def _count(found: dict[ProgramSpec | HeadSpec, NeededProgram], needed: NeededProgram) -> None:
    before = found.get(needed.spec, NeededProgram(needed.spec, 0, Work(0, 0)))
    found[needed.spec] = NeededProgram(needed.spec, before.runs + needed.runs, before.work + needed.work)


def report_programs(
    backend: RecordingBackend, chip: Chip, programs: Sequence[NeededProgram], on_program: OnProgram
) -> list[ProgramReport]:
    """Compile them, one after the other."""
    reports = []
    for number, needed in enumerate(programs):
        on_program(number, len(programs), needed.title)
        compilation = compile_program(backend.assembly.programs, needed.spec)
        reports.append(ProgramReport(needed, compilation, seconds_at_least(backend, chip, needed.work)))
    return reports


def seconds_at_least(backend: RecordingBackend, chip: Chip, work: Work) -> float | None:
    """Of all runs, on all chips of the mesh."""
    rate = chip.flops_per_second.get(backend.info.dtype)
    if rate is None:
        return None
    num_chips = backend.assembly.mesh.size
    num_readers = num_chips // backend.info.num_copies  # every copy of the model reads all weights
    return max(work.flops / (num_chips * rate), work.bytes_read / (num_readers * chip.bytes_per_second))
