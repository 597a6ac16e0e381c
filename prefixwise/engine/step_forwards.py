"""A step: a few forwards that run one after the other, and what each of them takes of which job.

A forward has blocks of prefixes, which are kept (prefill), or tails, which are scored (extend), or both (joined); or it
has rows, where an algorithm has them. In a joined forward the blocks come first, and tails read prefixes that were kept
before, or that go on with these blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prefixwise.engine.forward_batches import BlockRun, RowRun, TailRun, joined_batch, rows_batch
from prefixwise.engine.job import BatchRecord, Job
from prefixwise.engine.prefix_cache import CacheEntry
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, ForwardOutput, KVBlock, Prefix


@dataclass(frozen=True)
class Part:
    """Units first..stop of a job: blocks, segments or rows."""

    job: Job
    first: int
    stop: int

    @property
    def entries(self) -> list[CacheEntry]:
        """The places of its blocks."""
        return (self.job.entries or [])[self.first : self.stop]


@dataclass(eq=False)  # each is itself
class StepForward:
    """Parts of jobs that run as one forward."""

    has_rows: bool = False
    block_parts: list[Part] = field(default_factory=list)  # of prefixes, to be kept
    scored_parts: list[Part] = field(default_factory=list)  # tails or rows
    prefix_jobs: list[Job] = field(default_factory=list)  # one for each distinct prefix that is kept before and read
    num_blocks_read: int = 0
    num_tokens: int = 0
    batch: ForwardBatch | None = None
    bucket: int = 0  # what it is padded to
    start_seconds: float = 0.0  # until the device had it all
    # Of the prefixes that tails read, by their last blocks. Those that `block_parts` belong to have the first numbers.
    _prefix_numbers: dict[CacheEntry, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.block_parts or self.scored_parts)

    @property
    def is_prefill(self) -> bool:
        """Blocks and nothing else: nobody waits for its logits, and its seconds can be told apart."""
        return not self.scored_parts

    @property
    def parts(self) -> list[Part]:
        return [*self.block_parts, *self.scored_parts]

    @property
    def jobs(self) -> list[Job]:
        return [part.job for part in self.parts]

    def has_prefix(self, job: Job) -> bool:
        """Is the job's prefix, if it has one, among those that tails of this forward read?"""
        return not job.entries or job.entries[-1] in self._prefix_numbers

    def add_prefix(self, job: Job) -> None:
        """Of which all blocks are kept when the forward starts."""
        assert job.entries, "a prefix"
        self._prefix_numbers[job.entries[-1]] = len(self.block_parts) + len(self.prefix_jobs)
        self.prefix_jobs.append(job)
        self.num_blocks_read += len(job.entries)

    def behind(self, prefill: StepForward) -> StepForward:
        """These tails and, before them in the same forward, the blocks of a prefill, which they may read."""
        joined = StepForward(
            block_parts=prefill.block_parts,
            scored_parts=self.scored_parts,
            num_blocks_read=prefill.num_blocks_read,
            num_tokens=prefill.num_tokens + self.num_tokens,
        )
        for number, part in enumerate(prefill.block_parts):
            joined._prefix_numbers.update(dict.fromkeys(part.entries, number))
        for job in self.prefix_jobs:
            if not joined.has_prefix(job):
                joined.add_prefix(job)
            else:
                joined._check_begun(job)
        return joined

    def _check_begun(self, job: Job) -> None:
        """A job computes blocks behind started ones only. So what a prefix lacks is of one part, from the part's first
        block on, and what it has is what that part goes on from; the part may go on behind the prefix's end."""
        assert job.entries
        part = self.block_parts[self._prefix_numbers[job.entries[-1]]]
        whole = (part.job.entries or [])[: part.stop]
        assert job.entries == whole[: len(job.entries)], "all that a prefix lacks is of one part"

    def assemble(self) -> None:
        """Make the arrays; all that can be done before the step starts."""
        scored = [(part, part.job.plan) for part in self.scored_parts if part.job.plan is not None]
        normalize = any(part.job.normalize for part in self.scored_parts)
        if self.has_rows:
            self.batch = rows_batch([RowRun(plan, part.first, part.stop) for part, plan in scored], normalize=normalize)
            return
        blocks = [BlockRun(part.job.prefix_ids, part.first, part.stop) for part in self.block_parts]
        tails = [TailRun(plan.segments, part.first, part.stop, self._number(part.job)) for part, plan in scored]
        self.batch = joined_batch(blocks, tails, normalize=normalize)

    def _number(self, job: Job) -> int:
        """Where the job's prefix is among those of this forward; -1 for none."""
        return self._prefix_numbers[job.entries[-1]] if job.entries else -1

    def ready_batch(self) -> ForwardBatch:
        """With the blocks that are read, which by now are kept, but for those that it computes itself."""
        assert self.batch is not None, "assembled before it starts"
        if self.has_rows:
            return self.batch
        kept = [part.job.kept_blocks(part.first) for part in self.block_parts]
        going_on = [replace(prefix, blocks=each) for prefix, each in zip(self.batch.prefixes, kept, strict=True)]
        whole = [Prefix(job.kept_blocks()) for job in self.prefix_jobs]
        return replace(self.batch, prefixes=(*going_on, *whole))

    def keep(self, blocks: Iterable[KVBlock]) -> None:
        """The blocks that it computes, each to its place."""
        entries = (entry for part in self.block_parts for entry in part.entries)
        for entry, block in zip(entries, blocks, strict=True):
            entry.block = block

    def advance_jobs(self) -> None:
        """The jobs go on behind these parts."""
        for part in self.block_parts:
            for entry in part.entries:
                entry.is_started, entry.owner = True, None
            # What another job was to compute, and has left behind, is not saved after all.
            part.job.cached_tokens = min(part.job.cached_tokens, part.first * KV_BLOCK_SIZE)
        for part in self.scored_parts:
            first, stop = part.job.segments_of(part.first, part.stop)
            own = part.job.unit_tokens(part.first, part.stop)
            part.job.batches.append(BatchRecord(stop - first, own, self.num_tokens, self.bucket))
            part.job.advance(part.stop)

    def take_back(self) -> None:
        """The jobs go on before these parts. Their prefixes are lost anyway."""
        for part in self.scored_parts:
            part.job.go_back(part.first)

    def hand_out(self, output: ForwardOutput) -> None:
        """Every job its rows of the answer."""
        for part in self.block_parts:
            for entry in part.entries:
                entry.is_computed = True
        start = 0
        for part in self.scored_parts:
            segments = part.job.segments_of(part.first, part.stop)
            stop = start + part.job.num_score_rows(segments)
            normalizers = None if output.logsumexp is None else output.logsumexp[start:stop]
            part.job.take_in(segments, output.label_logits[start:stop], normalizers)
            start = stop


@dataclass
class Step:
    """Forwards in the order in which they run."""

    forwards: list[StepForward]
    num_tokens: int

    @property
    def jobs(self) -> list[Job]:
        """Each once, in the order in which they were served."""
        return list(dict.fromkeys(part.job for forward in self.forwards for part in forward.parts))

    @property
    def is_timed(self) -> bool:
        """Are the seconds of a part asked for? Then it runs by itself."""
        return any(job.timed for job in self.jobs)

    def take_back(self) -> None:
        """It was launched, and what it answers is nobody's: the jobs are as they were before it."""
        for forward in reversed(self.forwards):
            forward.take_back()
        for job in self.jobs:
            job.num_in_flight -= 1

    def count(self, seconds: float) -> None:
        """It is done, after so many seconds.

        Those of a prefill by itself are `prefill`, the others `extend`. In a joined forward they cannot be told apart:
        they are `extend` for a job that has tails in the step, and `prefill` for one that has only blocks.
        """
        apart = sum(forward.start_seconds for forward in self.forwards if forward.is_prefill)
        scored = {part.job for forward in self.forwards for part in forward.scored_parts}
        for job in scored:
            job.extend_seconds += seconds - apart
        for forward in self.forwards:
            for part in forward.block_parts:
                part.job.count_blocks(part.first, part.stop)
                if forward.is_prefill:
                    part.job.prefill_seconds += apart
                elif part.job not in scored:
                    part.job.prefill_seconds += seconds - apart
            for part in forward.scored_parts:
                part.job.tokens_left -= part.job.unit_tokens(part.first, part.stop)
