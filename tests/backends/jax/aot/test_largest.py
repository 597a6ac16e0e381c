from __future__ import annotations

from typing import Any

import pytest

from prefixwise.backends.jax.aot.compiling import Compilation
from prefixwise.backends.jax.aot.largest import LargestProgram, largest_program, sized
from prefixwise.backends.jax.inputs import ProgramSpec

SIZES = (256, 512, 1024, 2048, 4096, 8192)
EXTEND = ProgramSpec(512, "pool", keeps=False)


@pytest.mark.parametrize("most", [100, 256, 700, 4096, 5000, 8192, 10_000])
def test_the_largest_that_fits_is_found(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    tried: list[int] = []

    def compile_program(programs: Any, spec: ProgramSpec) -> Compilation:
        tried.append(spec.num_tokens)
        fits = spec.num_tokens <= most
        return Compilation("compiles" if fits else "out of memory", 0.0, None if fits else f"{spec.num_tokens} tokens")

    monkeypatch.setattr("prefixwise.backends.jax.aot.largest.compile_program", compile_program)
    told: list[int] = []
    found = largest_program(None, EXTEND, SIZES, told.append)  # type: ignore[arg-type]
    fitting = [size for size in SIZES if size <= most]
    beyond = [size for size in SIZES if size > most]
    reason = f"{beyond[0]} tokens" if beyond else None
    assert found == LargestProgram(fitting[-1] if fitting else 0, len(tried), reason)
    assert tried == told
    assert len(set(tried)) == len(tried) <= 4
    assert tried[0] == SIZES[-1]


def test_a_dense_mask_grows_with_its_row() -> None:
    dense = EXTEND.with_mask(512)
    assert sized(EXTEND, 3000) == ProgramSpec(3000, "pool", keeps=False)
    assert sized(dense, 3000) == ProgramSpec(3000, "pool", keeps=False, dense_columns=4096)
