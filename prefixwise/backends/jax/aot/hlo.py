"""What the compiler wrote down of a program: collectives, VMEM of kernels, the shapes of arrays."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

# jax can read a compiled program back, too, but only where it is of the very version of the compiler.
DUMP_OPTIONS: dict[str, str | bool] = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
_DUMPED = "*.jit_*.after_codegen.txt"

_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_KERNEL = re.compile(r'^.*custom_call_target="tpu_custom_call".*$', re.MULTILINE)
_VMEM = r'scoped_memory_configs":\[\{"memory_space":"1","offset":"(\d+)","size":"(\d+)"'
_GIVEN_VMEM, _USED_VMEM = re.compile(f'"{_VMEM}'), re.compile(f'"used_{_VMEM}')
_SHAPE = re.compile(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]")


def read_dump(folder: Path) -> str:
    """The program as it was turned into instructions; nothing where the compiler wrote nothing."""
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob(_DUMPED)))


def count_collectives(hlo: str) -> dict[str, int]:
    """By kind, as they stand in the program: those of a loop count once."""
    return dict(Counter(_COLLECTIVE.findall(hlo)))


def kernel_vmem_bytes(hlo: str) -> int | None:
    """What the largest of our kernels takes; None where there is none."""
    sizes = [_kernel_vmem(line) for line in _KERNEL.findall(hlo)]
    return max((size for size in sizes if size is not None), default=None)


def _kernel_vmem(instruction: str) -> int | None:
    """Of what a kernel is given it uses the first part. That is written down as the part's end: below its begin lie
    arrays of others."""
    given, used = _GIVEN_VMEM.search(instruction), _USED_VMEM.search(instruction)
    return None if given is None or used is None else int(used[2]) - int(given[1])


def array_shapes(hlo: str) -> set[tuple[int, ...]]:
    """Of everything that any instruction reads or writes."""
    return {tuple(map(int, found.split(","))) for found in set(_SHAPE.findall(hlo))}
