"""A step: a few forwards that run one after the other, and which parts of which requests each of them computes.

    prefill     KV blocks of prefixes, which are cached
    extend      item tokens, which are scored and attend to cached prefixes
    joined      both in one forward: the blocks first, then items, which may attend to them
    sequences   whole sequences of serial and packed

A step is filled (`step_filler.py`), run (`in_flight.py`), and its outputs are delivered to the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypedDict

import numpy as np

from prefixwise.contract.ragged import Int32Array
from prefixwise.engine.branch import Branch
from prefixwise.engine.forward_batches import BlockRun, ItemRun, SequenceRun, joined_batch, sequences_batch
from prefixwise.engine.prefix_cache import CacheEntry
from prefixwise.engine.request_state import BatchRecord, Line, RequestState
from prefixwise.forward.backend import check_output
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, KVBlock, Prefix
from prefixwise.plan.cost_model import Work


class _Needs(TypedDict):
    """Of a forward: what some of its requests need."""

    need_logsumexp: bool
    need_hidden: bool
    top_k: int
    lora_slots: Int32Array | None


class BlockPart:
    """Prefix blocks first..stop of one branch of a request."""

    __slots__ = ("branch", "entries", "first", "num_tokens", "request", "stop", "units")

    def __init__(self, branch: Branch, first: int, stop: int) -> None:
        self.branch, self.first, self.stop = branch, first, stop
        self.request = branch.request
        self.entries = (branch.entries or [])[first:stop]  # the cache entries of the blocks
        self.num_tokens = branch.plan.block_tokens(first, stop)
        self.units = branch.units_of_blocks(first, stop)  # those that are scored with the blocks

    @property
    def run(self) -> BlockRun:
        plan = self.branch.plan
        scored = plan.scoring.segments if plan.scoring is not None and self.units else None
        return BlockRun(plan.prefix_ids, self.first, self.stop, plan.vectors, plan.block_starts, scored, self.units)


class UnitPart:
    """Units first..stop of one branch of a request."""

    __slots__ = ("branch", "first", "num_tokens", "request", "segments", "stop")

    def __init__(self, branch: Branch, first: int, stop: int) -> None:
        self.branch, self.first, self.stop = branch, first, stop
        self.request = branch.request
        self.num_tokens = branch.plan.unit_tokens(first, stop)
        self.segments = branch.plan.segments_of(first, stop)  # the first and the end


@dataclass(eq=False)
class StepForward:
    """Parts of requests that run as one forward."""

    has_sequences: bool = False
    block_parts: list[BlockPart] = field(default_factory=list)  # prefix blocks, to be cached
    scored_parts: list[UnitPart] = field(default_factory=list)  # items or sequences
    prefix_branches: list[Branch] = field(default_factory=list)  # one per distinct prefix cached before and read
    num_blocks_read: int = 0
    num_tokens: int = 0
    batch: ForwardBatch | None = None
    bucket: int = 0  # tokens after padding
    start_seconds: float = 0.0  # until the device had all of it
    # Index of a prefix among the batch's prefixes, by its last block. The prefixes of `block_parts` come first.
    _prefix_index: dict[CacheEntry, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.block_parts or self.scored_parts)

    @property
    def is_prefill(self) -> bool:
        """Prefix blocks only: the forward has no logits to wait for, and its seconds can be measured."""
        return not self.scored_parts and not self.scores_blocks

    @property
    def scores_blocks(self) -> bool:
        """Some of its prefix blocks are scored, too."""
        return any(part.units for part in self.block_parts)

    @property
    def parts(self) -> list[BlockPart | UnitPart]:
        return [*self.block_parts, *self.scored_parts]

    @property
    def requests(self) -> list[RequestState]:
        return [part.request for part in self.parts]

    # Fill

    def has_prefix(self, branch: Branch) -> bool:
        """The branch has no prefix, or it is one that items of this forward attend to."""
        return not branch.entries or branch.entries[-1] in self._prefix_index

    def add_prefix(self, branch: Branch) -> None:
        """Add a prefix whose blocks are all cached when the forward starts."""
        assert branch.entries, "the branch has a prefix"
        self._prefix_index[branch.entries[-1]] = len(self.block_parts) + len(self.prefix_branches)
        self.prefix_branches.append(branch)
        self.num_blocks_read += len(branch.entries)

    def joined_with(self, prefill: StepForward) -> StepForward:
        """One forward of the prefill's blocks and, after them, these items, which may attend to the blocks."""
        joined = StepForward(
            block_parts=prefill.block_parts,
            scored_parts=self.scored_parts,
            num_blocks_read=prefill.num_blocks_read,
            num_tokens=prefill.num_tokens + self.num_tokens,
        )
        for index, part in enumerate(prefill.block_parts):
            joined._prefix_index.update(dict.fromkeys(part.entries, index))
        for branch in self.prefix_branches:
            if not joined.has_prefix(branch):
                joined.add_prefix(branch)
            else:
                joined._check_one_part(branch)
        return joined

    def _check_one_part(self, branch: Branch) -> None:
        """A branch computes blocks after launched ones only. So the missing blocks of a prefix belong to one part and
        begin at its first block, and the blocks before them are those that the part reads. The part may go on beyond
        the end of this prefix."""
        assert branch.entries
        part = self.block_parts[self._prefix_index[branch.entries[-1]]]
        whole = (part.branch.entries or [])[: part.stop]
        assert branch.entries == whole[: len(branch.entries)], "the missing blocks of a prefix belong to one part"

    def build_batch(self) -> None:
        """Build the arrays, except for the cached blocks, which may not be computed yet."""
        need_logsumexp = need_hidden = False
        top_k = max([part.request.task.top_k for part in self.block_parts if part.units], default=0)
        items: list[ItemRun] = []
        sequences: list[SequenceRun] = []
        for part in self.scored_parts:
            task, plan = part.request.task, part.branch.plan.scoring
            assert plan is not None, "a part that is scored has a plan"
            need_logsumexp |= task.need_logsumexp
            need_hidden |= task.need_hidden
            top_k = max(top_k, task.top_k)
            if self.has_sequences:
                sequences.append(SequenceRun(plan, part.first, part.stop))
            else:
                items.append(ItemRun(plan.segments, part.first, part.stop, self._index_of(part.branch)))
        needs = _Needs(
            need_logsumexp=need_logsumexp, need_hidden=need_hidden, top_k=top_k, lora_slots=self._lora_slots()
        )
        if self.has_sequences:
            self.batch = sequences_batch(sequences, **needs)
        else:
            self.batch = joined_batch([part.run for part in self.block_parts], items, **needs)

    def _lora_slots(self) -> Int32Array | None:
        """The slot of each token's LoRA adapter: blocks first, then items or sequences, as in the batch."""
        parts = self.parts
        loras = [part.request.lora for part in parts]
        if not any(loras):
            return None
        slots = np.array([0 if lora is None else lora.slot for lora in loras], np.int32)
        return slots.repeat([part.num_tokens for part in parts])

    def _index_of(self, branch: Branch) -> int:
        """The index of the branch's prefix in this forward; -1: the branch has none."""
        return self._prefix_index[branch.entries[-1]] if branch.entries else -1

    # Run

    def batch_with_prefixes(self) -> ForwardBatch:
        """The batch with the cached blocks that it reads. By now every block that it does not compute is cached."""
        assert self.batch is not None, "the batch is built before the forward starts"
        if not self.prefix_branches and not any(part.first for part in self.block_parts):
            return self.batch
        prefixes = list(self.batch.prefixes)
        for number, part in enumerate(self.block_parts):
            if part.first:
                prefixes[number] = Prefix(part.branch.cached_blocks(part.first), prefixes[number].segment)
        prefixes += [Prefix(branch.cached_blocks()) for branch in self.prefix_branches]
        return replace(self.batch, prefixes=tuple(prefixes))

    def cache_blocks(self, blocks: Iterable[KVBlock]) -> None:
        """Put the computed blocks into their cache entries."""
        entries = (entry for part in self.block_parts for entry in part.entries)
        for entry, block in zip(entries, blocks, strict=True):
            entry.block = block

    def advance_requests(self) -> None:
        """The forward is launched: the next parts of its requests are those after these."""
        for part in self.block_parts:
            for entry in part.entries:
                entry.is_launched, entry.owner = True, None
            # Blocks that another request reserved and left uncomputed are no cache hit after all.
            if part.request.cached_tokens > (tokens_before := part.branch.plan.block_starts[part.first]):
                part.request.count_hits(part.branch, tokens_before)
            if part.units:
                part.branch.advance_blocks(part.units)
            part.branch.num_in_flight += 1
        for unit_part in self.scored_parts:
            unit_part.branch.advance(unit_part.stop)
            unit_part.branch.num_in_flight += 1
        for request, (num_segments, num_tokens) in self._scored_by_request().items():
            request.batches.append(BatchRecord(num_segments, num_tokens, self.num_tokens, self.bucket))

    def roll_back(self) -> None:
        """Undo `advance_requests`, except for the prefixes, which are lost with the failure."""
        for part in self.scored_parts:
            part.branch.roll_back(part.first)
        for block_part in self.block_parts:
            block_part.branch.roll_back_blocks(block_part.units)
        for request in self._scored_by_request():
            request.batches.pop()

    def land(self) -> None:
        """The forward is not in flight any more."""
        for part in self.parts:
            part.branch.num_in_flight -= 1

    def _scored_by_request(self) -> dict[RequestState, tuple[int, int]]:
        """The segments that are scored, and the tokens of their units."""
        found: dict[RequestState, tuple[int, int]] = {}
        for part in self.scored_parts:
            (first, stop), (num_segments, num_tokens) = part.segments, found.get(part.request, (0, 0))
            found[part.request] = num_segments + stop - first, num_tokens + part.num_tokens
        return found

    # Deliver

    def deliver(self, output: ForwardOutput) -> None:
        """Give every request its rows of the output."""
        for part in self.block_parts:
            for entry in part.entries:
                entry.is_computed = True
        start = 0
        for branch, segments in self.scored_segments():
            begin, end = branch.plan.logit_rows(segments)
            stop = start + end - begin
            branch.request.receive(branch.rows_of(begin, end), output, slice(start, stop))
            branch.request.num_segments_scored += segments[1] - segments[0]
            start = stop

    def scored_segments(self) -> Iterator[tuple[Branch, tuple[int, int]]]:
        """Runs of segments in the order of their rows in the output."""
        for part in self.block_parts:
            for unit in part.units:
                yield part.branch, (unit, unit + 1)
        for unit_part in self.scored_parts:
            yield unit_part.branch, unit_part.segments


@dataclass
class Step:
    """Forwards in the order in which they run."""

    forwards: list[StepForward]
    num_tokens: int
    cut: Mapping[Line, float] = field(default_factory=dict)  # the weight of turns that go on in the next step
    num_pairs: int = 0  # query-key pairs, about

    @cached_property
    def requests(self) -> list[RequestState]:
        """Each once, in the order in which they were served."""
        return list(dict.fromkeys(part.request for forward in self.forwards for part in forward.parts))

    @property
    def work(self) -> Work:
        """For the cost model. The buckets are known once the step is launched."""
        return Work(sum(forward.bucket for forward in self.forwards), self.num_pairs, len(self.forwards))

    @property
    def is_timed(self) -> bool:
        """Some request asks for exact seconds, so the step runs by itself."""
        return any(request.task.is_timed for request in self.requests)

    def land(self) -> None:
        """The step is not in flight any more."""
        for request in self.requests:
            request.num_in_flight -= 1
        for forward in self.forwards:
            forward.land()

    def roll_back(self) -> None:
        """Discard a step that was launched: its requests are as they were before it, except for their prefixes."""
        for forward in reversed(self.forwards):
            forward.roll_back()

    def deliver(self, outputs: Sequence[ForwardOutput], model_size: int) -> bool:
        """Give every request its outputs. False if no logit is a finite number: a device that lies, or the model.

        Raises BackendError, before anything is delivered, if an output has another shape than it must have.
        """
        for forward, output in zip(self.forwards, outputs, strict=True):
            assert forward.batch is not None, "the batch is built before the forward starts"
            check_output(forward.batch, output, model_size)
        for forward, output in zip(self.forwards, outputs, strict=True):
            forward.deliver(output)
        finite = [np.isfinite(output.label_logits) for output in outputs if output.label_logits.size]
        if all(each.all() for each in finite):
            return True
        for branch, segments in (each for forward in self.forwards for each in forward.scored_segments()):
            branch.request.check_finite(branch.rows_of(*branch.plan.logit_rows(segments)))
        return any(each.any() for each in finite)

    def count(self, seconds: float) -> None:
        """Count the tokens and the seconds of a step that is done.

        The seconds of a prefill forward are `prefill`, those of the other forwards `extend`. The seconds of a joined
        forward cannot be divided: they are `extend` for a request with items in the step, and `prefill` for one that
        has only blocks in it.
        """
        prefill_seconds = sum(forward.start_seconds for forward in self.forwards if forward.is_prefill)
        scored = {part.request for forward in self.forwards for part in forward.scored_parts}
        for request in scored:
            request.extend_seconds += seconds - prefill_seconds
        for forward in self.forwards:
            of_blocks = {part.request for part in forward.block_parts}
            for request in of_blocks if forward.is_prefill else of_blocks - scored:
                request.prefill_seconds += prefill_seconds if forward.is_prefill else seconds - prefill_seconds
            for part in forward.block_parts:
                part.branch.count_prefill(part.num_tokens)
            for unit_part in forward.scored_parts:
                unit_part.request.tokens_left -= unit_part.num_tokens
