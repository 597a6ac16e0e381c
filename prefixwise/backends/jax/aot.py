"""Programs compiled for TPUs that are not attached: described devices, the real compiler, and its report.

The part of `prefixwise.aot` that needs jax. `RecordingBackend` stands where `JaxBackend` would on a real slice. It
computes nothing, records the forwards that the engine asks for, and compiles the programs behind them.
`prefixwise.aot.run.prepare_compiler` must be called before this module is imported.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

import numpy as np
from jax.experimental import topologies

from prefixwise.backends.jax.assembly import Assembly, assemble, attention_kind
from prefixwise.backends.jax.attention.api import choose_implementation
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.backends.jax.attention.pallas_tpu import PallasTpuAttention
from prefixwise.backends.jax.devices import DeviceChoice, resolve_dtype
from prefixwise.backends.jax.head_gemms import LABEL_TILE
from prefixwise.backends.jax.inputs import ProgramSpec, split_batch
from prefixwise.backends.jax.mesh import make_mesh
from prefixwise.backends.jax.programs import HeadSpec, Programs
from prefixwise.backends.jax.row_tiles import dense_columns
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import Backend, BackendOptions
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, KVBlock, RunningForward
from prefixwise.models.config import ModelConfig

Outcome = Literal["compiles", "out of memory", "fails"]

_MAX_CHIPS_PER_HOST = 8
_MEMORY_SIGNS = ("RESOURCE_EXHAUSTED", "Ran out of memory", "HbmOom")
_REASON_CHARS = 600

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

# jax can also read a compiled program back, but only with the same version of the compiler.
_DUMP_OPTIONS: dict[str, str | bool] = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
_DUMPED = "*.jit_*.after_codegen.txt"
_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_KERNEL = re.compile(r'^.*custom_call_target="tpu_custom_call".*$', re.MULTILINE)
_VMEM = r'scoped_memory_configs":\[\{"memory_space":"1","offset":"(\d+)","size":"(\d+)"'
_GIVEN_VMEM, _USED_VMEM = re.compile(f'"{_VMEM}'), re.compile(f'"used_{_VMEM}')
_SHAPE = re.compile(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]")


@dataclass(frozen=True)
class Chip:
    """One TPU chip, which is one device, by its published figures."""

    generation: str  # as a topology spells it
    title: str
    hbm_bytes: int
    flops_per_second: dict[str, float]  # of dense GEMMs, by dtype; the rate of float32 is not published
    bytes_per_second: float  # of HBM


CHIPS = {
    chip.generation: chip
    for chip in (
        Chip("v5e", "TPU v5e", 16 << 30, {"bfloat16": 197e12}, 819e9),
        Chip("v6e", "TPU v6e (Trillium)", 32 << 30, {"bfloat16": 918e12}, 1640e9),
    )
}


@dataclass(frozen=True)
class Slice:
    """Chips of one generation that are wired to each other. The compiler describes them; they hold no arrays."""

    name: str
    chip: Chip
    choice: DeviceChoice

    @property
    def num_chips(self) -> int:
        return len(self.choice.devices)


def describe_slice(name: str) -> Slice:
    """The slice of a topology like `v6e:2x2`. Raises BackendError where the compiler knows no such slice."""
    found = re.fullmatch(r"(\w+):([1-9]\d*)x([1-9]\d*)", name)
    if found is None or found[1] not in CHIPS:
        generations = " or ".join(CHIPS)
        raise BackendError(f"topology must be a generation ({generations}) and a grid, as in v6e:2x2, got {name!r}")
    chip, grid = CHIPS[found[1]], (int(found[2]), int(found[3]))
    # By default the compiler assumes four chips per host, and does not know the slice of one chip.
    hosts = {"chips_per_host_bounds": [*grid, 1]} if prod(grid) <= _MAX_CHIPS_PER_HOST else {}
    try:
        devices = topologies.get_topology_desc(name, platform="tpu", **hosts).devices
    except Exception as error:  # jax and its plugins raise errors of many types
        first_line = str(error).partition("\n")[0]
        raise BackendError(f"topology {name!r} is unknown to the compiler: {first_line}") from error
    return Slice(name, chip, DeviceChoice("tpu", tuple(devices), memory_bytes=chip.hbm_bytes))


class RecordedBlock(KVBlock):
    """A KV block that has a length and no contents."""


class RecordingBackend(Backend):
    """A model on described devices. `forwards` lists the batches that were started."""

    label_tile = LABEL_TILE

    def __init__(
        self,
        config: ModelConfig,
        options: BackendOptions,
        slice_: Slice,
        attention: AttentionImplementation | None = None,
    ) -> None:
        """`attention` replaces the implementation that would be chosen on the slice."""
        self.config = config
        dtype = resolve_dtype(options.dtype, "tpu")
        mesh = make_mesh(slice_.choice.devices, options.dp_size, options.tp_size)
        kind = attention_kind(config, slice_.choice, dtype)
        chosen = attention or choose_implementation(options.attention, **kind)
        if attention is None and isinstance(chosen, PallasTpuAttention):
            chosen = PallasTpuAttention(device=slice_.choice.devices[0].device_kind)
        self.assembly: Assembly = assemble(config, options, slice_.choice, mesh, dtype, chosen)
        self.info = replace(self.assembly.info, step_seconds=None)  # nothing is computed that could be timed
        self.forwards: list[ForwardBatch] = []

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return self.assembly.dtype.itemsize

    def spec(self, batch: ForwardBatch) -> ProgramSpec:
        """The trunk that would run the batch."""
        parts = split_batch(batch, self.info.num_copies)
        return self.assembly.spec(batch, max(part.num_tokens for part, _ in parts))

    def head_runs(self, batch: ForwardBatch) -> list[tuple[HeadSpec, int]]:
        """The programs behind the batch's trunk, and how often each runs: once for each tile of scored rows."""
        if not len(batch.score_tokens):
            return []
        most = max(len(rows) for _, rows in split_batch(batch, self.info.num_copies))
        num_tiles = -(-most // self.assembly.rows.score_rows)
        specs = [HeadSpec("score", self.spec(batch).num_tokens)]
        if batch.top_k:  # one pass over the vocabulary gives all
            return [(spec, num_tiles) for spec in (*specs, HeadSpec("vocabulary", top_k=batch.top_k))]
        specs.append(HeadSpec("labels"))
        if batch.need_logsumexp:
            specs.append(HeadSpec("logsumexp"))
        return [(spec, num_tiles) for spec in specs]

    def compile(self, spec: ProgramSpec | HeadSpec) -> Compilation:
        """Trace and compile one program. A failure is part of the result."""
        return compile_program(self.assembly.programs, spec)

    def start(self, batch: ForwardBatch) -> RunningForward:
        self.forwards.append(batch)
        lens = np.diff(batch.segment_starts)
        blocks = tuple(RecordedBlock(int(lens[segment])) for segment in batch.cache_segments)
        logsumexp = np.zeros(len(batch.score_tokens), np.float32) if batch.need_logsumexp else None
        output = ForwardOutput(np.zeros(batch.label_ids.shape, np.float32), logsumexp, blocks)
        if batch.top_k:
            shape = (len(batch.score_tokens), batch.top_k)
            output = replace(output, top_logits=np.zeros(shape, np.float32), top_ids=np.zeros(shape, np.int32))
        return RunningForward(blocks, lambda: output)


def resized(spec: ProgramSpec, num_tokens: int) -> ProgramSpec:
    """The same kind of program for another number of tokens. A dense mask becomes one of a single sequence."""
    return replace(spec, num_tokens=num_tokens, dense_columns=dense_columns(num_tokens) if spec.dense_columns else 0)


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM on one device, as the compiler has laid them out."""

    arguments: int
    output: int  # without what is written over an argument
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.output + self.temporaries + self.code


@dataclass(frozen=True)
class Compilation:
    """The result of compiling one program."""

    outcome: Outcome
    seconds: float
    reason: str | None = None  # the compiler's message, where the program does not compile
    memory: Memory | None = None
    kernel_vmem_bytes: int | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    hlo: str = ""


def compile_program(programs: Programs, spec: ProgramSpec | HeadSpec) -> Compilation:
    """Trace and compile one program. A failure is part of the result."""
    begun = perf_counter()
    with TemporaryDirectory(prefix="prefixwise-aot-") as folder:
        try:
            compiled = programs.lowered(spec).compile({"xla_dump_to": folder, **_DUMP_OPTIONS})
        except Exception as error:  # jax and its compilers raise errors of many types
            return Compilation(_outcome(str(error)), perf_counter() - begun, _reason(error))
        hlo = read_dump(Path(folder))
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
        kernel_vmem_bytes=kernel_vmem_bytes(hlo),
        collectives=count_collectives(hlo),
        hlo=hlo,
    )


def _outcome(message: str) -> Outcome:
    return "out of memory" if any(sign in message for sign in _MEMORY_SIGNS) else "fails"


def _reason(error: Exception) -> str:
    """The compiler's message, without the lists behind it."""
    message = re.split(r"\n\s*\n|\n\s*(?:Total|Program) \w+ (?:usage|requirement)", str(error).strip())[0]
    return " ".join(message.split())[:_REASON_CHARS] or type(error).__name__


def read_dump(folder: Path) -> str:
    """The HLO of the program as it became instructions; empty where the compiler wrote none."""
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob(_DUMPED)))


def count_collectives(hlo: str) -> dict[str, int]:
    """Collectives by kind, as they stand in the program: those in a loop count once."""
    return dict(Counter(_COLLECTIVE.findall(hlo)))


def kernel_vmem_bytes(hlo: str) -> int | None:
    """VMEM that the largest of our kernels uses; None where the program has no kernel."""
    sizes = [_kernel_vmem(line) for line in _KERNEL.findall(hlo)]
    return max((size for size in sizes if size is not None), default=None)


def _kernel_vmem(instruction: str) -> int | None:
    """A kernel uses the first part of what it is given. HLO names the end of that part; other arrays lie below it."""
    given, used = _GIVEN_VMEM.search(instruction), _USED_VMEM.search(instruction)
    return None if given is None or used is None else int(used[2]) - int(given[1])


def array_shapes(hlo: str) -> set[tuple[int, ...]]:
    """The shapes of all arrays that an instruction reads or writes."""
    return {tuple(map(int, found.split(","))) for found in set(_SHAPE.findall(hlo))}
