"""What is measured: the model, the geometries, how often; the exact ones and, for a test of the script, tiny ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.contract import floor_flops
from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.models.config import ModelConfig, RopeConfig

ENGINE_CASES = ("cold", "cached", "many", "long", "invariant")
SEARCH_CASES = ("poisson", "poisson20", "sglang")
BESIDE_CASES = ("beside_many", "beside_long")
HTTP_CASES = ("http", "http8", "small", *SEARCH_CASES, *BESIDE_CASES)
FP8_CASES = ("fp8_cold", "fp8_cached", "fp8_http8", "fp8_widths", "fp8_load")  # in a run of their own
CASES = ENGINE_CASES + HTTP_CASES + FP8_CASES
WARM_UP_ROUNDS = 3
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
class RateSearch:
    """The search for the highest rate of Poisson traffic whose p99 is within a bound."""

    geometry: Geometry
    bound_ms: float
    first_rate: float  # requests per second that it begins at
    probe_seconds: float = 4.0  # at each rate: long enough for a queue that grows to pass the bound
    min_arrivals: int = 200
    stride: float = 1.25  # between rates, until there is a border: it begins at the goal


@dataclass(frozen=True)
class Beside:
    """Small requests, one at a time, while large ones run all the time."""

    large: Geometry
    seconds: float = 15.0  # of the large ones alone, and of both
    small_seconds: float = 3.0  # of the small ones alone


@dataclass(frozen=True)
class Scale:
    """A model and its requests."""

    model: ModelConfig
    contract: Geometry
    small: Geometry
    long: Geometry
    many: tuple[int, int, int]  # items of one request, ascending; the first is the contract's
    searches: Mapping[str, RateSearch]  # by their cases
    besides: Mapping[str, Beside]
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


_SMALL = Geometry(300, 10, 20)

FULL = Scale(
    model=QWEN3_06B,
    contract=Geometry(2000, 500, 20),
    small=_SMALL,
    long=Geometry(200, 100, 500),
    many=(500, 2000, 10_000),
    searches={
        "poisson": RateSearch(_SMALL, 50.0, 1000.0),
        "poisson20": RateSearch(_SMALL, 20.0, 500.0),
        "sglang": RateSearch(Geometry(120, 10, 180), 500.0, 340.0, probe_seconds=8.0),
    },
    besides={
        "beside_many": Beside(Geometry(2000, 10_000, 20)),
        "beside_long": Beside(Geometry(200, 16, 8000)),
    },
    rounds=10,
)

_TINY_SMALL = Geometry(40, 4, 5)

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
    small=_TINY_SMALL,
    long=Geometry(20, 4, 60),
    many=(24, 48, 120),
    searches={
        # A bound that a busy machine meets at some rate: a search downwards takes longer with every rate.
        "poisson": RateSearch(_TINY_SMALL, 500.0, 80.0, probe_seconds=0.25, min_arrivals=10, stride=2.0),
        "poisson20": RateSearch(_TINY_SMALL, 500.0, 40.0, probe_seconds=0.25, min_arrivals=10, stride=2.0),
        "sglang": RateSearch(Geometry(12, 4, 18), 500.0, 80.0, probe_seconds=0.25, min_arrivals=10, stride=2.0),
    },
    besides={
        "beside_many": Beside(Geometry(160, 240, 5), seconds=0.3, small_seconds=0.1),
        "beside_long": Beside(Geometry(20, 4, 300), seconds=0.3, small_seconds=0.1),
    },
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
    serve_flags: tuple[str, ...] | None = None  # of `prefixwise serve`; None: the process that measures its engine
    model_folder: str | None = None  # of the random model for `prefixwise serve`; None: a folder for this run
    quantization: str | None = None  # of a run in FP8, whose rows have names of their own
    prefix_attention_dtype: str = "auto"  # of a run in FP8

    @property
    def title(self) -> str:
        if self.quantization is None:
            return self.backend
        is_plain = self.prefix_attention_dtype == "auto"
        return f"{self.backend} {self.quantization}{'' if is_plain else ', prefix attention too'}"

    def quantised(self) -> Settings | None:
        """The run of the FP8 cases, of which none is named `fp8_` in it; None: there are none for this backend."""
        cases = tuple(case.removeprefix("fp8_") for case in FP8_CASES if case in self.cases)
        if not cases or self.backend != "torch" or self.tiny or self.serve_flags is not None:
            return None
        return replace(self, cases=cases, quantization="fp8")

    @property
    def scale(self) -> Scale:
        return TINY if self.tiny else FULL

    @property
    def http_cases(self) -> tuple[str, ...]:
        return tuple(case for case in HTTP_CASES if case in self.cases)

    @property
    def needs_full_warm_up(self) -> bool:
        """Several requests at a time make forwards of many sizes, which must not be compiled while they are timed."""
        return bool({"http8", *SEARCH_CASES, *BESIDE_CASES} & set(self.cases))
