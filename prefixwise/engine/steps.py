"""Filling a step: what the device is to do next, taken from all live jobs.

A step is a few forwards that run one after the other (`step_forwards.py`): blocks of prefixes first, then tails (also
those whose prefix is made in this very step), then rows of the algorithms that have rows. Where the device does better
with one large forward than with two, blocks and tails are joined into one.

Whoever was not served for the longest time comes first, and while there are several jobs, each gets at most a share of
the step. So a large request does not make a small one wait for all of it, nor many small ones a large one. That is so
among jobs of one priority; others get what they leave.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter

from prefixwise.engine.job import Job
from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache
from prefixwise.engine.step_forwards import Part, Step, StepForward
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.algorithms import ScorePlan

SHARES = 4  # a job gets at most this part of a step while there are others
MAX_LEFT_OUT = 8  # so many jobs that could be served and do not fit, and the step is taken for full
MANY_LABELS = 16  # a request with more labels has forwards of its own, as every row of a forward reads them all
_SHARED_TAILS = ("tails", None)  # the key of the forward with tails of all jobs with few labels


@dataclass(frozen=True)
class StepLimits:
    """What a step may hold."""

    num_tokens: int
    max_prefill_tokens: int | None = None  # of one job; None: its share
    max_kv_blocks_read: int | None = None  # by one forward, a block counted for every prefix that has it
    joins_prefill: bool = False  # may blocks of prefixes and tails be one forward?


class StepFiller:
    """Fills one step."""

    def __init__(self, limits: StepLimits, cache: PrefixCache) -> None:
        self._limits = limits
        self._cache = cache
        self._prefill = StepForward()
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
        forwards = self._forwards()
        for forward in forwards:
            forward.assemble()
        return Step(forwards, self._num_tokens) if forwards else None

    def _forwards(self) -> list[StepForward]:
        """In their order: the prefill, joined with the tails that jobs share where that may be, then the others."""
        apart = [forward for forward in (self._prefill, *self._scored.values()) if not forward.is_empty]
        tails = self._scored.get(_SHARED_TAILS)
        if tails is None or tails.is_empty or self._prefill.is_empty or not self._limits.joins_prefill:
            return apart
        if any(part.job.timed for part in self._prefill.block_parts):  # the seconds of its prefill are asked for
            return apart
        joined, most = tails.behind(self._prefill), self._limits.max_kv_blocks_read
        if most is not None and joined.num_blocks_read > most:
            return apart
        return [joined, *(forward for forward in apart if forward is not self._prefill and forward is not tails)]

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
        first, stop = job.blocks_to_compute(KV_BLOCK_SIZE)
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
            first, stop = job.blocks_to_compute(self._room_left if self._num_tokens else KV_BLOCK_SIZE)
            stop = min(stop, first + 1)
        if first == stop or not self._can_read(self._prefill, stop):
            return 0
        for entry in (job.entries or [])[first:stop]:
            entry.owner = job  # also of what another job has left behind
            self._in_the_making.add(entry)
        self._prefill.num_blocks_read += stop
        self._prefill.block_parts.append(Part(job, first, stop))
        return self._count(self._prefill, job.block_tokens(first, stop))

    def _can_read(self, forward: StepForward, num_blocks: int) -> bool:
        """May the forward list so many blocks more?"""
        most = self._limits.max_kv_blocks_read
        return most is None or forward.is_empty or forward.num_blocks_read + num_blocks <= most

    def _has_prefix(self, job: Job) -> bool:
        return all(entry.is_started or entry in self._in_the_making for entry in job.entries or ())

    def _take_units(self, job: Job, plan: ScorePlan, room: int, *, is_served: bool) -> None:
        """Tails, or rows, that fit. `is_served`: has the job got something in this step?

        One that is larger than the job's share is taken where it fits the step; one that is larger than a step has one
        of its own.
        """
        forward = self._forward_for(job, plan)
        is_new = not forward.has_prefix(job)
        if not self._can_read(forward, len(job.entries or ()) if is_new else 0):
            return
        budget = plan.token_budget - (forward.num_tokens if plan.mask == "dense" else 0)
        first, stop = job.units_to_score(min(room, budget), at_least_one=not self._num_tokens)
        if first == stop and not is_served:
            first, stop = job.units_to_score(min(self._room_left, budget), at_least_one=False)
            stop = min(stop, first + 1)
        if first == stop:
            return
        if is_new:
            forward.add_prefix(job)
        forward.scored_parts.append(Part(job, first, stop))
        self._count(forward, job.unit_tokens(first, stop))

    def _forward_for(self, job: Job, plan: ScorePlan) -> StepForward:
        """Jobs share a forward where they have the same layout, and few labels."""
        owner = job if plan.segments.label_ids.shape[1] > MANY_LABELS else None
        key = (plan.algorithm, plan.mask, owner) if plan.rows else ("tails", owner)
        if key not in self._scored:
            self._scored[key] = StepForward(has_rows=bool(plan.rows))
        return self._scored[key]

    def _count(self, forward: StepForward, num_tokens: int) -> int:
        forward.num_tokens += num_tokens
        self._num_tokens += num_tokens
        return num_tokens
