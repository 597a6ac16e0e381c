"""Jobs made by hand, and a room in which steps are filled from them and run, without a thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.engine.job import Job
from prefixwise.engine.prefix_cache import PrefixCache
from prefixwise.engine.step_forwards import Step, StepForward
from prefixwise.engine.steps import SHARES, StepFiller, StepLimits
from prefixwise.forward.backend import Backend
from prefixwise.plan.label_rows import lay_out_segments, plan_labels
from prefixwise.plan.shared_prefix import SplitItems
from tests.plan.planning import planner_of

STEP = 1024
SHARE = STEP // SHARES


def prefix_of(num_tokens: int, start: int = 0) -> Int32Array:
    return (np.arange(num_tokens, dtype=np.int32) + start) % 500


def job_of(
    prefix: Int32Array | int,
    tail_lens: list[int],
    algorithm: str = "prefill_extend",
    *,
    labels: tuple[tuple[int, ...], ...] = ((3,), (5,)),
    normalize: bool = False,
    **options: Any,
) -> Job:
    """Every item has its own tokens; a prefix of so many tokens is nobody else's."""
    global _num_made
    _num_made += 1
    prefix_ids = prefix_of(prefix, 7 * _num_made) if isinstance(prefix, int) else prefix
    tails = Ragged.from_rows([[(i + k) % 97 for k in range(length)] for i, length in enumerate(tail_lens)])
    split = SplitItems(prefix_ids, np.full(len(tail_lens), len(prefix_ids)), tails)
    plan = planner_of(**options).plan(lay_out_segments(split, plan_labels(labels)), algorithm)
    return Job(prefix_ids if plan.needs_prefill else prefix_ids[:0], plan, normalize=normalize)


_num_made = 0


class Room:
    """A cache, limits and a device, and steps filled and run one after the other."""

    def __init__(
        self, num_tokens: int = STEP, *, num_blocks: int = 100, backend: Backend | None = None, **limits: Any
    ) -> None:
        self.limits = StepLimits(num_tokens, **limits)
        self.cache = PrefixCache(num_blocks)
        self.fake = FakeBackend()
        self.backend = backend or self.fake
        self._order: dict[Job, None] = {}  # as the scheduler has it: whoever was served goes to the end

    def fill(self, *jobs: Job) -> Step | None:
        self._order.update(dict.fromkeys(jobs))
        return StepFiller(self.limits, self.cache).fill([job for job in self._order if job in jobs])

    def run(self, *jobs: Job) -> Step:
        """The next step, filled and run as the scheduler does it."""
        step = self.fill(*jobs)
        assert step is not None, "there is something to do"
        for job in step.jobs:
            del self._order[job]
            self._order[job] = None
        running = []
        for forward in step.forwards:
            forward.advance_jobs()
        for forward in step.forwards:
            batch = forward.ready_batch()
            assert batch.num_tokens == forward.num_tokens
            num_listed = sum(len(prefix.blocks) for prefix in batch.prefixes) + len(batch.cache_segments)
            assert num_listed == forward.num_blocks_read
            running.append(self.backend.start(batch))
            forward.keep(running[-1].blocks)
        for forward, each in zip(step.forwards, running, strict=True):
            forward.hand_out(each.wait())
        step.count(0.0)
        return step

    def finish(self, *jobs: Job) -> list[Step]:
        """All steps until the last job is done; each job goes as soon as it is."""
        live, steps = list(jobs), []
        while live:
            steps.append(self.run(*live))
            for job in [job for job in live if job.is_complete]:
                live.remove(job)
                job.drop_prefix(self.cache)
                if self.backend is self.fake:
                    check(job)
        return steps


def check(job: Job) -> None:
    """All logits of a job that is done, against its plain contexts."""
    assert job.plan is not None
    segments, targets = job.plan.segments, job.plan.segments.label_ids[0]
    for number, tail in enumerate(segments.tails):
        context = np.concatenate([segments.prefix_ids[: segments.prefix_lens[number]], tail])
        assert np.array_equal(job.label_logits[number], fake_logits(context, targets))


def tokens_of(step: Step | None, job: Job) -> int:
    """What the job has of the step."""
    assert step is not None
    blocks = [part for forward in step.forwards for part in forward.block_parts if part.job is job]
    units = [part for forward in step.forwards for part in forward.scored_parts if part.job is job]
    return sum(job.block_tokens(part.first, part.stop) for part in blocks) + sum(
        job.unit_tokens(part.first, part.stop) for part in units
    )


def kind_of(forward: StepForward) -> str:
    if forward.has_rows:
        return "rows"
    if not forward.block_parts:
        return "extend"
    return "joined" if forward.scored_parts else "prefill"


def forward_of(step: Step | None, kind: str) -> StepForward:
    assert step is not None
    (found,) = [forward for forward in step.forwards if kind_of(forward) == kind]
    return found
