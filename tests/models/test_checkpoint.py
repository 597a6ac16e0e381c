from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefixwise.models.checkpoint import map_rows

VALUES = np.arange(30, dtype=np.float32).reshape(10, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "values"
    path.write_bytes(b"seven.." + VALUES.tobytes())
    return path


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (3, 4), (9, 10), (4, 4), (8, 99), (10, 12)])
def test_rows_are_those_of_a_slice(file: Path, start: int, stop: int) -> None:
    np.testing.assert_array_equal(map_rows(file, 7, np.float32, (10, 3), start, stop), VALUES[start:stop])


def test_a_vector_is_rows_of_one_number(file: Path) -> None:
    np.testing.assert_array_equal(map_rows(file, 7, np.float32, (30,), 4, 6), [4.0, 5.0])


def test_rows_cannot_be_written_to(file: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        map_rows(file, 7, np.float32, (10, 3), 0, 2)[0, 0] = 1.0
