"""What a backend returns is checked before it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, FakeBlock
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import PROBE, check_blocks, check_output
from prefixwise.forward.batch import ForwardBatch

# Two blocks of a prefix, and three scored tokens with two labels.
BATCH = replace(
    PROBE,
    segment_starts=np.array([0, 128, 130, 140]),
    cache_segments=(0, 1),
    score_tokens=np.arange(3),
    label_ids=np.zeros((3, 2), np.int32),
    need_logsumexp=True,
    need_hidden=True,
)
GOOD: dict[str, Any] = {
    "label_logits": np.zeros((3, 2), np.float32),
    "logsumexp": np.zeros(3, np.float32),
    "hidden": np.zeros((3, 8), np.float32),
}


def check(batch: ForwardBatch, **changes: Any) -> None:
    output = FakeBackend().forward(PROBE)
    check_output(batch, replace(output, **{**GOOD, **changes}), model_size=8)


def test_the_right_shapes_pass() -> None:
    check(BATCH)
    check(replace(BATCH, need_logsumexp=False, need_hidden=False), logsumexp=None, hidden=None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("label_logits", np.zeros((1, 2), np.float32), r"label_logits \[3, 2\] of float32, got \[1, 2\] of float32"),
        ("label_logits", np.zeros((3, 1), np.float32), r"got \[3, 1\]"),
        ("label_logits", np.zeros((3, 2), np.float16), "got .* of float16"),
        ("logsumexp", np.zeros(1, np.float32), r"logsumexp \[3\] of float32, got \[1\]"),
        ("logsumexp", None, "got none"),
        ("hidden", np.zeros((3, 7), np.float32), r"hidden \[3, 8\] of float32, got \[3, 7\]"),
        ("hidden", None, "got none"),
    ],
)
def test_another_shape_or_dtype_is_an_error(name: str, value: object, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        check(BATCH, **{name: value})


class Released(FakeBlock):
    released = 0

    def release(self) -> None:
        Released.released += 1


@pytest.mark.parametrize("lens", [[128], [128, 3], [128, 2, 2], []])
def test_other_blocks_are_an_error_and_given_back(lens: list[int]) -> None:
    blocks = [Released(num_tokens, np.zeros(num_tokens, np.int32)) for num_tokens in lens]
    before = Released.released
    with pytest.raises(BackendError, match=r"KV blocks of \[128, 2\] tokens, got"):
        check_blocks(BATCH, blocks)
    assert Released.released - before == len(lens)


def test_one_block_per_cached_segment_passes() -> None:
    blocks = [FakeBlock(num_tokens, np.zeros(num_tokens, np.int32)) for num_tokens in (128, 2)]
    assert check_blocks(BATCH, blocks) is blocks


def test_the_probe_runs_on_any_backend() -> None:
    output = FakeBackend().forward(PROBE)
    check_output(PROBE, output, 8)
    assert np.isfinite(output.label_logits).all()
