"""Filling a step: what the device is to do next, taken from all live jobs.

A step is a few forwards that run one after the other: blocks of prefixes first, then tails (also those whose prefix is
made in this very step), then rows of the algorithms that have rows. Whoever was not served for the longest time comes
first, and while there are several jobs, each gets at most a share of the step. So a large request does not make a small
one wait for all of it, nor many small ones a large one. That is so among jobs of one priority; others get what they
leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import attrgetter

from itemwise.backends.base import PREFIX_BLOCK, ForwardBatch, ForwardOutput, Prefix, PrefixBlock
from itemwise.engine.forward_batches import BlockRun, RowRun, TailRun, extend_batch, prefill_batch, rows_batch
from itemwise.engine.job import BatchRecord, Job
from itemwise.engine.prefix_cache import CacheEntry, PrefixCache
from itemwise.plan.algorithms import ScorePlan

SHARES = 4  # a job gets at most this part of a step while there are others
MAX_LEFT_OUT = 8  # so many jobs that could be served and do not fit, and the step is taken for full
MANY_LABELS = 16  # a request with more labels has forwards of its own, as every row of a forward reads them all


@dataclass(frozen=True)
class StepLimits:
    """What a step may hold."""

    num_tokens: int
    max_prefill_tokens: int | None = None  # of one job; None: its share
    max_blocks_read: int | None = None  # by one forward, a block counted for every prefix that has it


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


@dataclass
class StepForward:
    """Parts of jobs that run as one forward."""

    kind: str  # prefill, extend or rows
    parts: list[Part] = field(default_factory=list)
    prefix_jobs: list[Job] = field(default_factory=list)  # extend: one job for each distinct prefix
    num_blocks_read: int = 0
    num_tokens: int = 0
    batch: ForwardBatch | None = None
    bucket: int = 0  # what it is padded to
    start_seconds: float = 0.0  # until the device had it all

    @property
    def is_prefill(self) -> bool:
        return self.kind == "prefill"

    @property
    def jobs(self) -> list[Job]:
        return [part.job for part in self.parts]

    def prefix_number(self, job: Job) -> int:
        """Where the job's prefix is among those of this forward; -1 for none, and the next number for a new one."""
        if not job.entries:
            return -1
        for number, other in enumerate(self.prefix_jobs):
            if other.entries and other.entries[-1] is job.entries[-1]:
                return number
        return len(self.prefix_jobs)

    def assemble(self) -> None:
        """Make the arrays; all that can be done before the step starts."""
        if self.is_prefill:
            self.batch = prefill_batch([BlockRun(part.job.prefix_ids, part.first, part.stop) for part in self.parts])
            return
        normalize = any(part.job.normalize for part in self.parts)
        if self.kind == "rows":
            self.batch = rows_batch(
                [RowRun(part.job.plan, part.first, part.stop) for part in self.parts if part.job.plan is not None],
                normalize=normalize,
            )
            return
        tails = [
            TailRun(part.job.plan.segments, part.first, part.stop, self.prefix_number(part.job))
            for part in self.parts
            if part.job.plan is not None
        ]
        self.batch = extend_batch(tails, normalize=normalize)

    def ready_batch(self) -> ForwardBatch:
        """With the blocks that are read, which by now are kept."""
        assert self.batch is not None, "assembled before it starts"
        if self.kind == "rows":
            return self.batch
        if self.is_prefill:
            kept = [part.job.kept_blocks(part.first) for part in self.parts]
            prefixes = [replace(prefix, blocks=each) for prefix, each in zip(self.batch.prefixes, kept, strict=True)]
        else:
            prefixes = [Prefix(job.kept_blocks()) for job in self.prefix_jobs]
        return replace(self.batch, prefixes=tuple(prefixes))

    def keep(self, blocks: Iterable[PrefixBlock]) -> None:
        """The blocks of a prefill, each to its place."""
        entries = (entry for part in self.parts for entry in part.entries)
        for entry, block in zip(entries, blocks, strict=True):
            entry.block = block

    def advance_jobs(self) -> None:
        """The jobs go on behind these parts."""
        for part in self.parts:
            if self.is_prefill:
                for entry in part.entries:
                    entry.is_started, entry.owner = True, None
                # What another job was to compute, and has left behind, is not saved after all.
                part.job.cached_tokens = min(part.job.cached_tokens, part.first * PREFIX_BLOCK)
                continue
            first, stop = part.job.segments_of(part.first, part.stop)
            own = part.job.unit_tokens(part.first, part.stop)
            part.job.batches.append(BatchRecord(stop - first, own, self.num_tokens, self.bucket))
            part.job.advance(part.stop)

    def count(self, seconds: float) -> None:
        """The forward is done."""
        for part in self.parts:
            job = part.job
            if self.is_prefill:
                job.count_blocks(part.first, part.stop)
                job.prefill_seconds += seconds
            else:
                job.tokens_left -= job.unit_tokens(part.first, part.stop)
                job.extend_seconds += seconds

    def hand_out(self, output: ForwardOutput) -> None:
        """Every job its rows of the answer."""
        start = 0
        for part in self.parts:
            segments = part.job.segments_of(part.first, part.stop)
            stop = start + part.job.num_score_rows(segments)
            normalizers = None if output.log_normalizers is None else output.log_normalizers[start:stop]
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


class StepFiller:
    """Fills one step."""

    def __init__(self, limits: StepLimits, cache: PrefixCache) -> None:
        self._limits = limits
        self._cache = cache
        self._prefill = StepForward("prefill")
        self._scored: dict[object, StepForward] = {}
        self._in_the_making: set[CacheEntry] = set()
        self._num_tokens = 0
        self._num_left_out = 0  # jobs that could be served with more room
        self._is_room = True  # for further prefixes

    def fill(self, jobs: Collection[Job]) -> Step | None:
        """From jobs in the order of their turn. None where nothing can be done now.

        Jobs stay as they are, but for the places that their prefixes get.
        """
        in_order = sorted(jobs, key=attrgetter("priority"))  # among equals the turn decides
        for _, of_one_priority in groupby(in_order, attrgetter("priority")):
            self._fill_from(list(of_one_priority))
            if self._room_left <= 0:
                break
        forwards = [forward for forward in (self._prefill, *self._scored.values()) if forward.parts]
        for forward in forwards:
            forward.assemble()
        return Step(forwards, self._num_tokens) if forwards else None

    def _fill_from(self, jobs: Sequence[Job]) -> None:
        """From jobs of one priority, what those before them have left."""
        busy = (job for job in jobs if not job.is_complete)
        is_alone = len(list(islice(busy, 2))) == 1
        share = self._limits.num_tokens if is_alone else max(1, self._limits.num_tokens // SHARES)
        for job in jobs:
            if self._room_left <= 0 or self._num_left_out == MAX_LEFT_OUT:
                break
            if not job.is_complete and self._find_prefix(job):
                before = self._num_tokens
                self._serve(job, min(share, self._room_left))
                # One that waits for a block that another job computes is not left out for want of room.
                self._num_left_out += self._num_tokens == before and self._is_ready(job)

    def _find_prefix(self, job: Job) -> bool:
        """Where one must wait for places, those behind it get none either, or it would wait for ever."""
        if job.entries is None and job.keys:
            self._is_room = self._is_room and job.find_prefix(self._cache)
            return self._is_room
        return True

    def _serve(self, job: Job, room: int) -> None:
        num_taken = self._take_blocks(job, room)
        if job.plan is not None and not job.is_scored and self._has_prefix(job):
            self._take_units(job, job.plan, room - num_taken, is_served=num_taken > 0)

    def _is_ready(self, job: Job) -> bool:
        """Could it be served, with more room?"""
        first, stop = job.blocks_to_compute(PREFIX_BLOCK)
        return first < stop or (not job.is_scored and self._has_prefix(job))

    @property
    def _room_left(self) -> int:
        return self._limits.num_tokens - self._num_tokens

    def _take_blocks(self, job: Job, room: int) -> int:
        """Blocks of the job's prefix that are to be computed; how many tokens they have.

        One that is larger than the job's share is taken where it fits the step, or is the step's first.
        """
        most = min(room, self._limits.max_prefill_tokens or room)
        first, stop = job.blocks_to_compute(most)
        if first == stop:
            first, stop = job.blocks_to_compute(self._room_left if self._num_tokens else PREFIX_BLOCK)
            stop = min(stop, first + 1)
        if first == stop or not self._can_read(self._prefill, stop):
            return 0
        for entry in (job.entries or [])[first:stop]:
            entry.owner = job  # also of what another job has left behind
            self._in_the_making.add(entry)
        self._prefill.num_blocks_read += stop
        return self._add(self._prefill, Part(job, first, stop), job.block_tokens(first, stop))

    def _can_read(self, forward: StepForward, num_blocks: int) -> bool:
        """May the forward list so many blocks more?"""
        most = self._limits.max_blocks_read
        return most is None or not forward.parts or forward.num_blocks_read + num_blocks <= most

    def _has_prefix(self, job: Job) -> bool:
        return all(entry.is_started or entry in self._in_the_making for entry in job.entries or ())

    def _take_units(self, job: Job, plan: ScorePlan, room: int, *, is_served: bool) -> None:
        """Tails, or rows, that fit. `is_served`: has the job got something in this step?

        One that is larger than the job's share is taken where it fits the step; one that is larger than a step has one
        of its own.
        """
        forward = self._forward_for(job, plan)
        is_new = forward.prefix_number(job) == len(forward.prefix_jobs)
        num_blocks = len(job.entries or ()) if is_new else 0
        if not self._can_read(forward, num_blocks):
            return
        budget = plan.token_budget - (forward.num_tokens if plan.mask == "dense" else 0)
        first, stop = job.units_to_score(min(room, budget), at_least_one=not self._num_tokens)
        if first == stop and not is_served:
            first, stop = job.units_to_score(min(self._room_left, budget), at_least_one=False)
            stop = min(stop, first + 1)
        if first == stop:
            return
        if is_new:
            forward.prefix_jobs.append(job)
            forward.num_blocks_read += num_blocks
        self._add(forward, Part(job, first, stop), job.unit_tokens(first, stop))

    def _forward_for(self, job: Job, plan: ScorePlan) -> StepForward:
        """Jobs share a forward where they have the same layout, and few labels."""
        owner = id(job) if plan.segments.label_ids.shape[1] > MANY_LABELS else None
        kind = "rows" if plan.rows else "extend"
        key = (kind, plan.algorithm if plan.rows else None, plan.mask, owner)
        if key not in self._scored:
            self._scored[key] = StepForward(kind)
        return self._scored[key]

    def _add(self, forward: StepForward, part: Part, num_tokens: int) -> int:
        forward.parts.append(part)
        forward.num_tokens += num_tokens
        self._num_tokens += num_tokens
        return num_tokens
