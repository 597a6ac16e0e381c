"""The LoRA kernels: compiled on a GPU, and in Triton's interpreter (`test_interpreted.py`)."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixwise.backends.torch.lora import LoraSlots, lora_width
from prefixwise.contract.errors import ModelLoadError
from prefixwise.forward.batch import ForwardBatch
from prefixwise.models.config import ModelConfig
from prefixwise.models.lora import MATRICES, LoraAdapter, LoraPair, Matrix, matrix_shape, num_parts
from tests.backends.torch.batches import extend_batch, prefill
from tests.backends.torch.cuda import test_paged
from tests.backends.torch.cuda.test_paged import ITEMS, PREFIXES, READS, SMALL, make_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16

pytestmark = [*test_paged.pytestmark, *([] if INTERPRETED else [pytest.mark.gpu])]


def numbers(*shape: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(DTYPE).to(DEVICE)


def added(x: Tensor, out: Tensor, slots: list[int], a: Tensor, b: Tensor) -> Tensor:
    from prefixwise.backends.torch.cuda.lora_kernels import add_lora
    from tests.backends.torch.cuda.interpreter import allow_loops

    if INTERPRETED:
        allow_loops()
    found = out.clone()
    add_lora(x, found, torch.tensor(slots, dtype=torch.int32, device=DEVICE), a, b)
    return found


def test_a_row_has_its_own_adapter_and_no_other_changes() -> None:
    """Three slots in tiles of rows of other slots and of none, with sizes that are no multiples of tiles."""
    num_rows, size, rows_out, width = 100, 200, 150, 48
    slots = [0] * 10 + [2] * 30 + [1] * 5 + [3] * 20 + [0] * 30 + [1] * 5
    x, out = numbers(num_rows, size, seed=1), numbers(num_rows, rows_out, seed=2)
    out[0, 0] = -0.0
    a, b = numbers(4, width, size, seed=3) / size**0.5, numbers(4, rows_out, width, seed=4)
    found = added(x, out, slots, a, b)
    for row, slot in enumerate(slots):
        if not slot:
            assert torch.equal(found[row].view(torch.int16), out[row].view(torch.int16))
            continue
        inner = (a[slot].float() @ x[row].float()).to(DTYPE)
        expected = out[row].float() + b[slot].float() @ inner.float()
        torch.testing.assert_close(found[row].float(), expected, atol=0.05, rtol=0.02)
        alone = [slot if each == row else 0 for each in range(num_rows)]
        if row in (11, 60):
            assert torch.equal(added(x, out, alone, a, b)[row], found[row])
            moved = added(x[[row] * 3], out[[row] * 3], [0, 1, slot], a, b)
            assert torch.equal(moved[2], found[row])


def test_columns_behind_x() -> None:
    """The same numbers for a row's own slot, and zeros for all others."""
    from prefixwise.backends.torch.cuda.lora_kernels import shrink, shrink_into_tail
    from tests.backends.torch.cuda.interpreter import allow_loops

    if INTERPRETED:
        allow_loops()
    num_rows, size, width = 70, 200, 48
    numbers_of = [0] * 5 + [2] * 25 + [1] * 5 + [0] * 30 + [3] * 5
    slots = torch.tensor(numbers_of, dtype=torch.int32, device=DEVICE)
    x, a = numbers(num_rows, size + 3 * width + 16, seed=1), numbers(4, width, size, seed=2) / size**0.5
    before, expected = x.clone(), shrink(x[:, :size], slots, a)
    shrink_into_tail(x, slots, a, 3)
    tails = x[:, size : size + 3 * width].reshape(num_rows, 3, width)
    for row, slot in enumerate(numbers_of):
        for number in (1, 2, 3):
            wanted = expected[row] if number == slot else torch.zeros_like(expected[row])
            assert torch.equal(tails[row, number - 1], wanted)
    assert torch.equal(x[:, :size], before[:, :size])
    assert torch.equal(x[:, size + 3 * width :], before[:, size + 3 * width :])


def random_adapter(config: ModelConfig, seed: int, rank: int = 4) -> LoraAdapter:
    random = np.random.default_rng(seed)
    layers = []
    for _ in range(config.num_layers):
        pairs = {}
        for matrix in MATRICES:
            rows, columns = matrix_shape(config, matrix)
            width = num_parts(matrix) * rank
            a = random.standard_normal((width, columns)).astype(np.float32) / np.float32(columns**0.5)
            b = random.standard_normal((rows, width)).astype(np.float32) / np.float32(64)
            pairs[matrix] = LoraPair(a, b)
        layers.append(pairs)
    return LoraAdapter("random", rank, tuple(layers), None)


def test_numbers_that_are_none_in_float16_are_refused() -> None:
    """Columns of one adapter are multiplied with zeros in the rows of all others."""
    rows, columns = matrix_shape(SMALL, "down")
    shape = rows, columns + lora_width("down", 4)
    wide: list[dict[Matrix, Tensor]] = [{"down": torch.zeros(shape).half()} for _ in range(SMALL.num_layers)]
    slots = LoraSlots(SMALL, 1, 4, torch.float16, torch.device("cpu"), wide)
    adapter = random_adapter(SMALL, 1)
    slots.load(1, adapter, torch.float32)
    adapter.layers[0]["down"].b[0, 0] = 1e6
    with pytest.raises(ModelLoadError, match="within the range of float16"):
        slots.load(1, adapter, torch.float32)
    assert all(matrix.isfinite().all() for layer in wide for matrix in layer.values())


class TestRunner:
    @pytest.mark.parametrize("is_wide", [True, False], ids=["wide", "narrow"])
    def test_adapters_through_pages(self, is_wide: bool) -> None:
        """As without pages; and rows of the model itself as in a forward without adapters."""

        def with_slots(batch: ForwardBatch, of_items: list[int]) -> ForwardBatch:
            lens = np.diff(batch.segment_starts)
            return replace(batch, lora_slots=np.array(of_items, np.int32).repeat(lens))

        found = []
        for is_paged in (True, False):
            backend = make_backend(SMALL, is_paged=is_paged, max_loras=2, is_wide=is_wide)
            assert backend._loras is not None and bool(backend._loras.wide) == is_wide
            for slot in (1, 2):
                backend.load_lora(slot, random_adapter(SMALL, slot))
            blocks = prefill(backend, PREFIXES)
            batch = extend_batch(ITEMS, READS, blocks)
            slots = [number % 3 for number in range(len(ITEMS))]
            mixed = backend.forward(with_slots(batch, slots)).label_logits
            plain = backend.forward(batch).label_logits
            is_plain = np.array(slots) == 0
            np.testing.assert_array_equal(mixed[is_plain], plain[is_plain])
            assert np.abs(mixed[~is_plain] - plain[~is_plain]).min() > 0
            found.append(mixed)
        assert np.abs(found[0] - found[1]).max() <= 0.01 * np.abs(found[1]).max()
