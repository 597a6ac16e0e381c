"""What is measured: the model, the geometries, how often; the exact ones and, for a test of the script, tiny ones."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.contract import floor_flops
from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.models.config import ModelConfig, RopeConfig

ENGINE_CASES = ("cold", "cached", "many", "long", "invariant")
HTTP_CASES = ("http", "http8", "small", "poisson")
CASES = ENGINE_CASES + HTTP_CASES
WARM_UP_ROUNDS = 3
BOUND_MS = 50.0  # of the p99 under Poisson traffic
FULL_GEMM_ROWS = 16_384  # tokens of a full step on an accelerator


@dataclass(frozen=True)
class Geometry:
    """Requests of one shape."""

    query_tokens: int
    items: int
    item_tokens: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.query_tokens, self.items, self.item_tokens

    @property
    def title(self) -> str:
        return f"{self.query_tokens:,} + {self.items:,} x {self.item_tokens:,}"

    def flops(self, model: ModelConfig, *, cached: bool = False) -> float:
        """Of one request, by the floor's count."""
        return floor_flops(model, *self.shape, cached=cached)


@dataclass(frozen=True)
class Scale:
    """A model and its requests."""

    model: ModelConfig
    contract: Geometry
    small: Geometry
    long: Geometry
    many: tuple[int, int, int]  # items of one request, ascending; the first is the contract's
    first_rate: float  # requests per second that the search begins at
    probe_seconds: float  # of Poisson traffic at each rate
    min_arrivals: int
    rounds: int  # where the user leaves it open
    token_budget: int | None = None  # None: the device's

    @property
    def largest(self) -> Geometry:
        return Geometry(self.contract.query_tokens, self.many[-1], self.contract.item_tokens)

    @property
    def gemm_rows(self) -> dict[str, int]:
        """Rows of the GEMMs that cases stand beside: those of the contract's items, or a full step."""
        contract = self.contract.items * self.contract.item_tokens
        full = min(self.long.items * self.long.item_tokens, FULL_GEMM_ROWS)
        return {"contract": min(contract, FULL_GEMM_ROWS), "full": full}


FULL = Scale(
    model=QWEN3_06B,
    contract=Geometry(2000, 500, 20),
    small=Geometry(300, 10, 20),
    long=Geometry(200, 100, 500),
    many=(500, 2000, 10_000),
    first_rate=600.0,
    probe_seconds=4.0,
    min_arrivals=200,
    rounds=10,
)

TINY = Scale(
    model=ModelConfig(
        family="qwen3",
        vocab_size=512,
        model_size=32,
        mlp_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qkv_bias=False,
        qk_norm=True,
        tied_head=True,
        max_context_len=1024,
    ),
    contract=Geometry(160, 24, 5),
    small=Geometry(40, 4, 5),
    long=Geometry(20, 4, 60),
    many=(24, 48, 120),
    first_rate=80.0,
    probe_seconds=0.25,
    min_arrivals=10,
    rounds=3,
    token_budget=1024,
)


@dataclass(frozen=True)
class Settings:
    """One backend's run; as JSON it is the argument of the server's process."""

    backend: str
    cases: tuple[str, ...]
    rounds: int
    tiny: bool = False

    @property
    def scale(self) -> Scale:
        return TINY if self.tiny else FULL

    @property
    def http_cases(self) -> tuple[str, ...]:
        return tuple(case for case in HTTP_CASES if case in self.cases)

    @property
    def needs_full_warm_up(self) -> bool:
        """Several requests at a time make forwards of many sizes, which must not be compiled while they are timed."""
        return bool({"http8", "poisson"} & set(self.cases))
