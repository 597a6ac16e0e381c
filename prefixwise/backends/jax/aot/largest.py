"""The largest program of a kind that fits: searched among the sizes that the server has, by compiling them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prefixwise.backends.jax import buckets
from prefixwise.backends.jax.aot.compiling import Compilation, compile_program
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.programs import Programs


@dataclass(frozen=True)
class LargestProgram:
    """Of the sizes that were asked for."""

    num_tokens: int  # 0: none compiles
    num_compiled: int  # programs, to find it
    # Why the next larger one does not compile, in the compiler's words; None: it is the largest that there is.
    reason: str | None


def largest_program(
    programs: Programs, kind: ProgramSpec, sizes: Sequence[int], on_size: Callable[[int], None]
) -> LargestProgram:
    """`sizes`: ascending. The largest is tried first: it mostly fits."""
    tried: dict[int, Compilation] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            on_size(size)
            tried[size] = compile_program(programs, sized(kind, size))
        return tried[size].outcome == "compiles"

    below, above = -1, len(sizes)  # the largest that is known to fit, and the smallest that is known not to
    probe = len(sizes) - 1
    while above - below > 1:
        below, above = (probe, above) if fits(sizes[probe]) else (below, probe)
        probe = (below + above) // 2
    reason = tried[sizes[above]].reason if above < len(sizes) else None
    return LargestProgram(sizes[below] if below >= 0 else 0, len(tried), reason)


def sized(kind: ProgramSpec, num_tokens: int) -> ProgramSpec:
    """The same kind of program for so many tokens; a dense mask has one row of them."""
    columns = buckets.dense_columns(num_tokens) if kind.dense_columns else 0
    return replace(kind, num_tokens=num_tokens, dense_columns=columns)
