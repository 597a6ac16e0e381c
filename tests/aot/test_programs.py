from __future__ import annotations

import pytest

from prefixwise.aot.programs import LargestProgram, largest_program
from prefixwise.backends.jax.aot import Compilation

SIZES = (256, 512, 1024, 2048, 4096, 8192)


@pytest.mark.parametrize("most", [100, 256, 700, 4096, 5000, 8192, 10_000])
def test_the_largest_that_fits_is_found(most: int) -> None:
    compiled: list[int] = []
    announced: list[int] = []

    def compile_size(size: int) -> Compilation:
        compiled.append(size)
        fits = size <= most
        return Compilation("compiles" if fits else "out of memory", 0.0, None if fits else f"{size} tokens")

    found = largest_program(compile_size, SIZES, announced.append)
    fitting = [size for size in SIZES if size <= most]
    beyond = [size for size in SIZES if size > most]
    reason = f"{beyond[0]} tokens" if beyond else None
    assert found == LargestProgram(fitting[-1] if fitting else 0, len(compiled), reason)
    assert compiled == announced
    assert len(set(compiled)) == len(compiled) <= 4
    assert compiled[0] == SIZES[-1]
