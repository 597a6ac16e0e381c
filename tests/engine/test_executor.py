"""Running a plan: how many forwards of how many rows, and logits in the order of the items."""

from __future__ import annotations

from typing import Any

import numpy as np

from itemwise.backends.base import ForwardBatch, Layout
from itemwise.backends.fake import FakeBackend, fake_logits
from itemwise.contract.ragged import Ragged
from itemwise.engine.executor import Executor, PlanOutput
from itemwise.plan.algorithms import Planner
from itemwise.plan.label_rows import lay_out_segments, plan_labels
from itemwise.plan.options import PlanOptions
from itemwise.plan.shared_prefix import SplitItems

PREFIX = np.arange(100, dtype=np.int32)
ITEMS = [list(range(number % 7, number % 7 + 10)) for number in range(500)]
LABELS = [(3,), (5,)]


def run(
    algorithm: str,
    *,
    items: list[list[int]] = ITEMS,
    normalize: bool = False,
    on_progress: Any = None,
    **options: Any,
) -> tuple[PlanOutput, list[ForwardBatch]]:
    backend = FakeBackend()
    planner = Planner(backend.config, backend.info, PlanOptions(**options).resolve(backend.info))
    split = SplitItems(PREFIX, np.full(len(items), 100), Ragged.from_rows(items))
    plan = planner.plan(lay_out_segments(split, plan_labels(LABELS)), algorithm)
    return Executor(backend).run(plan, normalize=normalize, on_progress=on_progress), backend.forwards


def rows_per_forward(forwards: list[ForwardBatch]) -> list[int]:
    return [len(batch.row_starts) - 1 for batch in forwards]


class TestForwards:
    """500 items of 10 tokens behind a prefix of 100."""

    def test_packed_chunks_run_as_rows_of_one_forward(self) -> None:
        """Chunks of 32 make 16 rows of 420 tokens, the last of 300; four rows fit a budget of 2,000."""
        _, forwards = run("packed", chunk_size=32, token_budget=2000)
        assert rows_per_forward(forwards) == [4, 4, 4, 4]
        assert [batch.num_tokens for batch in forwards] == [1680, 1680, 1680, 1260 + 300]
        assert {batch.layout for batch in forwards} == {Layout.PACKED}

    def test_packed_in_one_forward_where_the_budget_allows(self) -> None:
        _, forwards = run("packed", chunk_size=32)
        assert rows_per_forward(forwards) == [16]

    def test_serial_copies_the_prefix_for_every_item(self) -> None:
        _, forwards = run("serial", token_budget=2000)
        assert rows_per_forward(forwards) == [18] * 27 + [14]
        assert {batch.layout for batch in forwards} == {Layout.CAUSAL}

    def test_prefill_extend_is_one_prefill_and_as_few_forwards_as_the_budget_allows(self) -> None:
        _, forwards = run("prefill_extend", token_budget=2000)
        assert [batch.num_tokens for batch in forwards] == [100, 2000, 2000, 1000]
        assert [batch.layout for batch in forwards] == [Layout.CAUSAL] + [Layout.EXTEND] * 3

    def test_prefill_extend_in_chunks(self) -> None:
        _, forwards = run("prefill_extend", chunk_size=32)
        assert len(forwards) == 1 + -(-500 // 32)


def test_logits_stand_in_the_order_of_the_items() -> None:
    expected = [fake_logits(np.concatenate([PREFIX, item]), np.array([3, 5])) for item in ITEMS]
    for algorithm in ("serial", "packed", "prefill_extend"):
        output, _ = run(algorithm, chunk_size=7, token_budget=900)
        assert np.array_equal(output.label_logits, np.stack(expected))
        assert output.log_normalizers is None


def test_normalizers_come_only_when_asked_for() -> None:
    output, forwards = run("prefill_extend", items=ITEMS[:3], normalize=True, chunk_size=2)
    assert output.log_normalizers is not None
    assert output.log_normalizers.shape == (3,)
    assert [batch.need_normalizers for batch in forwards] == [False, True, True]


def test_progress_is_told_after_every_forward() -> None:
    told: list[tuple[int, int]] = []
    run("prefill_extend", chunk_size=200, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(200, 500), (400, 500), (500, 500)]


def test_time_is_told_apart() -> None:
    output, _ = run("packed", items=ITEMS[:2])
    assert output.prefill_seconds >= 0
    assert output.extend_seconds > 0
