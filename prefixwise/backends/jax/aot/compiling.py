"""One program through the compiler: does it compile, and what does it need?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

from prefixwise.backends.jax.aot import hlo
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.programs import HeadSpec, Programs

Outcome = Literal["compiles", "out of memory", "fails"]

_MEMORY_SIGNS = ("RESOURCE_EXHAUSTED", "Ran out of memory", "HbmOom")
_REASON_CHARS = 600


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM on one device, as the compiler has laid them out."""

    arguments: int
    output: int  # less what is written where an argument was
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.output + self.temporaries + self.code


@dataclass(frozen=True)
class Compilation:
    """What came of it."""

    outcome: Outcome
    seconds: float
    reason: str | None = None  # the compiler's own, where it does not compile
    memory: Memory | None = None
    kernel_vmem_bytes: int | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    hlo: str = ""


def compile_program(programs: Programs, spec: ProgramSpec | HeadSpec) -> Compilation:
    """Trace and compile it; what goes wrong is part of the answer."""
    begun = perf_counter()
    with TemporaryDirectory(prefix="prefixwise-aot-") as folder:
        try:
            compiled = programs.lowered(spec).compile({"xla_dump_to": folder, **hlo.DUMP_OPTIONS})
        except Exception as error:  # whatever jax and its compilers raise
            return Compilation(_outcome(str(error)), perf_counter() - begun, _reason(error))
        text = hlo.read_dump(Path(folder))
    found: Any = compiled.memory_analysis()
    memory = Memory(
        arguments=found.argument_size_in_bytes,
        output=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )
    return Compilation(
        "compiles",
        perf_counter() - begun,
        memory=memory,
        kernel_vmem_bytes=hlo.kernel_vmem_bytes(text),
        collectives=hlo.count_collectives(text),
        hlo=text,
    )


def _outcome(message: str) -> Outcome:
    return "out of memory" if any(sign in message for sign in _MEMORY_SIGNS) else "fails"


def _reason(error: Exception) -> str:
    """The compiler's words, without the lists behind them."""
    message = re.split(r"\n\s*\n|\n\s*(?:Total|Program) \w+ (?:usage|requirement)", str(error).strip())[0]
    return " ".join(message.split())[:_REASON_CHARS] or type(error).__name__
