"""What is measured inside of the server's process, before it opens: `ScoringEngine.score`, memory, GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from time import perf_counter

from benchmarks.contract import random_request
from benchmarks.gemm_rate import gemm_rate
from benchmarks.goals.cases import WARM_UP_ROUNDS, Geometry, Settings
from benchmarks.goals.fp8_rows import load_row, width_rows
from benchmarks.goals.targets import Measured, attempt
from benchmarks.random_checkpoint import random_checkpoint
from prefixwise.backends.load import load_backend
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import BackendOptions

MEMORY_ROUNDS = 2
MEMORY_SLACK_BYTES = 64 << 20  # allocators hand out whole pieces
SECOND_POOL_BYTES = 4 << 30  # for the prefixes of a second engine on the same accelerator

ROWS_IN_ORDER = ("cold", "cached", "many", "many memory", "long", "invariant", "widths", "load")

Report = Callable[[str], None]


def make_engine(settings: Settings, *, batch_invariant: bool | None = None) -> ScoringEngine:
    """Random weights in the backend's own dtype, bfloat16 on accelerators; prefixes are cached, as a server does."""
    scale = settings.scale
    options = BackendOptions(
        settings.backend,
        batch_invariant=batch_invariant,
        quantization=settings.quantization,
        prefix_attention_dtype="auto" if settings.quantization is None else settings.prefix_attention_dtype,
        token_budget=scale.token_budget,
        prefix_cache_bytes=SECOND_POOL_BYTES if batch_invariant is not None and not settings.tiny else None,
    )
    return ScoringEngine(EngineConfig("random"), Scheduler(load_backend(random_checkpoint(scale.model), options)), None)


@dataclass(frozen=True)
class Timing:
    """Rounds of one geometry."""

    seconds: float  # the median
    fill: float  # tokens computed / tokens with padding
    cached_tokens: int  # of the last round's query
    algorithm: str


class EngineRows:
    """One engine's figures. Each case has queries of its own, so that none finds another's prefix."""

    def __init__(self, engine: ScoringEngine, settings: Settings, report: Report) -> None:
        self._engine = engine
        self._settings = settings
        self._scale = settings.scale
        self._report = report
        self._next_seed = 0
        self.errors: dict[str, str] = {}  # by the case that could not be measured

    def measure(self) -> list[Measured]:
        """Memory first: its peak cannot be taken back, and GEMMs or larger programs would hide it."""
        cases: dict[str, Callable[[], Sequence[Measured]]] = {
            "many memory": lambda: [self._memory_row()],
            "cold": self._cold_rows,
            "cached": lambda: [self._cached_row()],
            "many": lambda: [self._many_row()],
            "long": lambda: [self._long_row()],
            "invariant": lambda: [self._invariant_row()],
            "widths": lambda: width_rows(self._settings, self._report),
            "load": lambda: [load_row(self._report)],
        }
        chosen = {"cold", *self._settings.cases, *(["many memory"] if "many" in self._settings.cases else [])}
        found = {name: attempt(name, case, self.errors) for name, case in cases.items() if name in chosen}
        return [row for name in ROWS_IN_ORDER for row in found.get(name, ())]

    @cached_property
    def gemm(self) -> dict[str, float]:
        """FLOP/s of the model's GEMMs, by the name of a number of rows."""
        self._report("GEMMs")
        info, model = self._engine.backend.info, self._scale.model
        rows = self._scale.gemm_rows
        return {
            name: gemm_rate(model, info.name, info.device_kind, rows[name], info.compute_dtype or info.dtype)
            for name in rows
        }

    @cached_property
    def cold(self) -> Timing:
        """The contract workload, every query new: what other figures are held to."""
        self._report("contract workload, cold")
        return self._time(self._engine, self._scale.contract)

    def small_seconds(self) -> float:
        """What a small request takes without a server around it."""
        self._report("small request")
        return self._time(self._engine, self._scale.small).seconds

    def _cold_rows(self) -> list[Measured]:
        geometry, cold = self._scale.contract, self.cold
        title = f"{geometry.title}, engine, cold prefix"
        note = f"{1000 * cold.seconds:.2f} ms, {cold.algorithm}"
        fill = Measured("cold fill", "tokens computed / padded, the same", cold.fill, "%")
        return [self._throughput("cold", title, geometry, cold, note=note), fill]

    def _cached_row(self) -> Measured:
        self._report("contract workload, prefix cached")
        geometry = self._scale.contract
        timing = self._time(self._engine, geometry, same=True)
        note = f"{1000 * timing.seconds:.2f} ms, {timing.cached_tokens:,} of {geometry.query_tokens:,} tokens cached"
        return self._throughput("cached", f"{geometry.title}, prefix cached", geometry, timing, note=note, cached=True)

    def _many_row(self) -> Measured:
        """Held to the contract workload's items per second in this very run."""
        geometry, contract = self._scale.largest, self._scale.contract
        self._report(f"{geometry.items:,} items")
        timing = self._time(self._engine, geometry)
        per_second = contract.items / self.cold.seconds
        note = f"{1000 * timing.seconds:.1f} ms; the bound is {contract.items:,} items, cold"
        row = self._throughput("many", f"{geometry.title}, engine", geometry, timing, note=note)
        return replace(row, bound=per_second, gemm="full")

    def _memory_row(self) -> Measured:
        """One query, so that no further prefix is cached; linear means that growth is in proportion to the items."""
        self._report("memory")
        peaks = [self._peak_bytes()]
        geometry, many = self._scale.contract, self._scale.many
        for items in many:
            request = random_request(self._scale.model, geometry.query_tokens, items, geometry.item_tokens, seed=0)
            for _ in range(MEMORY_ROUNDS):
                self._engine.score(request)
            peaks.append(self._peak_bytes())
        title = f"growth of peak MiB, {many[1]:,} to {many[2]:,} items"
        details = {"items": [0, *many], "peak_bytes": peaks}
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(peaks):
            return Measured("many memory", title, None, "MiB", note="not known on this device", details=details)
        bound = memory_bound(many, known[1:])
        note = f"bound: in proportion to {many[0]:,} to {many[1]:,} (+64 MiB); peak {known[-1] / 2**30:.2f} GiB"
        growth = (known[3] - known[2]) / 2**20
        return Measured("many memory", title, growth, "MiB", bound=bound / 2**20, note=note, details=details)

    def _peak_bytes(self) -> int | None:
        return self._engine.backend.memory_stats().get("peak_bytes")

    def _long_row(self) -> Measured:
        self._report("long items")
        geometry = self._scale.long
        timing = self._time(self._engine, geometry)
        note = f"{1000 * timing.seconds:.1f} ms, {geometry.items / timing.seconds:,.0f} items/s"
        row = self._throughput("long", f"{geometry.title}, share of GEMM rate", geometry, timing, note=note)
        return replace(row, value=(row.flops or 0.0) / self.gemm["full"], unit="%", gemm="full")

    def _invariant_row(self) -> Measured:
        """A second engine on the same device, closed again: without it where it is the default, else with it."""
        self._report("batch_invariant: a second engine")
        is_default = self._engine.backend.info.batch_invariant
        engine = make_engine(self._settings, batch_invariant=not is_default)
        try:
            other = self._time(engine, self._scale.contract)
        finally:
            engine.close()
        timing, without = (self.cold, other) if is_default else (other, self.cold)
        cost = timing.seconds / without.seconds - 1
        title = f"{self._scale.contract.title}, cold, batch_invariant"
        note = f"{1000 * timing.seconds:.2f} ms, {100 * cost:+.1f} % time against {1000 * without.seconds:.2f} without"
        row = self._throughput("invariant", title, self._scale.contract, timing, note=note)
        return replace(row, details={**row.details, "cost": round(cost, 4)})

    def _throughput(
        self, name: str, title: str, geometry: Geometry, timing: Timing, *, note: str, cached: bool = False
    ) -> Measured:
        flops = geometry.flops(self._scale.model, cached=cached) / timing.seconds
        details = {"geometry": geometry.shape, **asdict(timing)}
        return Measured(name, title, geometry.items / timing.seconds, "items/s", flops, note=note, details=details)

    def _time(self, engine: ScoringEngine, geometry: Geometry, *, same: bool = False) -> Timing:
        """Requests are made before the clock starts; `same`: one query and its items again and again."""
        seconds: list[float] = []
        for number in range(WARM_UP_ROUNDS + self._settings.rounds):
            self._next_seed += not (same and number)
            request = random_request(self._scale.model, *geometry.shape, seed=self._next_seed)
            if number == WARM_UP_ROUNDS - 1:
                debug = engine.score(replace(request, return_debug=True)).debug or {}
                before = engine.scheduler.stats()
                continue
            begin = perf_counter()
            result = engine.score(request)
            seconds.append(perf_counter() - begin)
        after = engine.scheduler.stats()
        computed, padded = after.tokens_computed - before.tokens_computed, after.tokens_padded - before.tokens_padded
        measured = seconds[WARM_UP_ROUNDS - 1 :]
        return Timing(median(measured), computed / padded, result.usage.cached_tokens, str(debug["algorithm"]))


def memory_bound(items: Sequence[int], peak_bytes: Sequence[int]) -> float:
    """Bytes that the peak may grow by over the second span, if growth is in proportion to the items: as over the first
    one for each item, and a little that does not depend on them."""
    (first, second, third), (low, middle, _) = items, peak_bytes
    return (middle - low) * (third - second) / (second - first) + MEMORY_SLACK_BYTES
