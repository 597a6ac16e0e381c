"""Fixtures that several rooms share: small checkpoints, made once per run, their scorers and their references."""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for the hub
os.environ["PREFIXWISE_WEIGHT_CACHE"] = "off"  # nothing is left in the user's folder; tests of it name one of their own
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch and other processes share the GPU
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# A shell starts commands in the background with SIGINT ignored, and so would be the children that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from prefixwise import Scorer
from prefixwise.contract.errors import BackendError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.plan.algorithms import PlanOptions
from tests.checkpoints import add_tokenizer, make_hf_checkpoint
from tests.warm_program import WarmPopen
from tests.web.browser import why_no_browser

if TYPE_CHECKING:
    from tests.reference import Reference

ROOT = Path(__file__).parents[1]

subprocess.Popen = WarmPopen  # type: ignore[misc]  # our programs are forked, with their imports done

# An example takes as long as the machine lets it; what is slow is shown by pytest's own list.
settings.register_profile("prefixwise", deadline=None)
settings.load_profile("prefixwise")

# Models that are no plain member of their family: the family, and what differs.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Large enough that matrix products of this shape give other bits at other row counts unless they are held to one.
    "medium": (
        "qwen3",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "initializer_range": 0.05,
        },
    ),
    # Gemma's other parts at such widths, and its heads: of 256, all on one KV head.
    "medium-gemma": (
        "gemma",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
            "head_dim": 256,
            "initializer_range": 0.04,
        },
    ),
    # Windows of some KV blocks in every layer, and Gemma 2's parts, at such widths.
    "medium-window": (
        "mistral",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 300,
            "initializer_range": 0.05,
        },
    ),
    "medium-gemma2": (
        "gemma2",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "initializer_range": 0.05,
        },
    ),
    # Experts at such widths: many small ones, of which some get few tokens and some none.
    "medium-experts": (
        "qwen3_moe",
        {
            "hidden_size": 512,
            "moe_intermediate_size": 192,
            "num_experts": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "initializer_range": 0.05,
        },
    ),
    # Two layers of Qwen3-0.6B, for devices that choose their kernels by shape.
    "wide": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "initializer_range": 0.04,
        },
    ),
    # The heads of Qwen3-0.6B, Qwen2.5-1.5B, SmolLM2-135M and Gemma 2B, narrow; little else divides by the number of
    # shards.
    "heads-16-8": ("qwen3", {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}),
    "heads-12-2": ("qwen2", {"num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 96}),
    "heads-9-3": (
        "llama",
        {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 72,
            "intermediate_size": 83,
            "vocab_size": 509,
            "num_hidden_layers": 2,
        },
    ),
    "heads-8-1": ("gemma", {"num_attention_heads": 8, "head_dim": 16}),
    # The QK norm of all heads together, of which some are repeated and some are zeros on many devices.
    "heads-of-olmo2": ("olmo2", {"num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 96}),
    # Experts whose inner size four devices cannot share evenly.
    "heads-of-experts": ("qwen3_moe", {"moe_intermediate_size": 42}),
    "heads-of-gemma2": ("gemma2", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}),
    # Few sizes of programs, each of one layer, for warming all of them up.
    "short": (
        "qwen3",
        {
            "num_hidden_layers": 1,
            "max_position_embeddings": 1023,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    ),
}
PLAN_OPTIONS = [field.name for field in fields(PlanOptions)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nobody shall take a run without a browser for one that has tried the page."""
    reason = why_no_browser()
    if reason is not None:
        terminalreporter.write_line(f"THE PAGE WAS NOT TESTED IN A BROWSER: {reason}", red=True, bold=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live until the end, so the garbage collector does not look at them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 20, 50)  # as in our server


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without PyTorch (`make test-python`) modules that import it, themselves or through a helper, are left out."""
    if find_spec("torch") is None and collection_path.suffix == ".py" and _imports_torch(collection_path):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Without PyTorch a test that turns out to need it is skipped."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    is_missing = isinstance(error, ImportError | BackendError) and "torch" in str(error).lower()
    if is_missing and find_spec("torch") is None:
        report.outcome, report.longrepr = "skipped", (str(item.path), None, f"needs PyTorch: {error}")
    return report


def _imports_torch(path: Path) -> bool:
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    names = [alias.name for each in statements if isinstance(each, ast.Import) for alias in each.names]
    names += [str(each.module) for each in statements if isinstance(each, ast.ImportFrom)]
    helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith(("tests.", "benchmarks.")))
    return any(name.startswith(("torch", "transformers", "prefixwise.backends.torch.")) for name in names) or any(
        _imports_torch(helper) for helper in helpers if helper.exists()
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module may say `is_slow(test, parameters)` of single cases, where a mark would reach too many."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_slow = getattr(item.module, "is_slow", None)
            if is_slow is not None and is_slow(item.originalname, item.callspec.params):
                item.add_marker("slow")


@pytest.fixture
def restored_environment() -> Iterator[None]:
    """Variables that a test sets for a compiler hold for that test alone."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(
    scope="module",
    params=[
        "torch-cpu",
        "jax-cpu",
        pytest.param("torch-cuda", marks=pytest.mark.gpu),
        pytest.param("jax-cuda", marks=pytest.mark.gpu),
    ],
)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every backend on every device, as options of a scorer."""
    backend, device = request.param.split("-")
    pytest.importorskip(backend)
    return {"backend": backend, "device": device}


@pytest.fixture(scope="module", params=["torch", "jax"])
def cpu(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every backend on a CPU, as options of a scorer."""
    return {"backend": request.param, "device": "cpu"}


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Lets XLA compile for a CPU in a third of the time, to the same arithmetic in slower code.

    `test_isolation.py` holds the bits of the code that users get. With USERS_COMPILER in the environment, as in
    `make test-all`, all tests do.
    """
    if "USERS_COMPILER" in os.environ:
        yield
        return
    from prefixwise.backends.jax.programs import COMPILER_OPTIONS
    from tests.backends.jax.quick_compiler import QUICKLY

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMPILER_OPTIONS, "cpu", QUICKLY)
        yield


@pytest.fixture
def users_compilation() -> Iterator[None]:
    """The code that users get, in a module whose other tests have `quick_compilation`, which holds to its end."""
    pytest.importorskip("jax")
    from prefixwise.backends.jax.programs import COMPILER_OPTIONS
    from tests.backends.jax.quick_compiler import FOR_USERS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMPILER_OPTIONS, "cpu", FOR_USERS)
        yield


@pytest.fixture(scope="module")
def programs_on_disk(run_folder: Path) -> Iterator[None]:
    """Programs that JAX compiles are stored for all modules of this run that use this fixture, in all its processes."""
    pytest.importorskip("jax")
    from tests.backends.jax.compilations import shared_cache

    with shared_cache(run_folder / "programs"):
        yield


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def checkpoint_of(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small checkpoint with a tokenizer, by the name of its family or one of MODELS.

    It is made once for a run, and each process has a copy of its own: some tests look for servers by their model.
    """
    shared, copies = run_folder / "made_checkpoints", tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> None:
        base, overrides = MODELS.get(family, (family, {}))
        made = make_hf_checkpoint(tmp_path_factory.mktemp("made") / family, base, **overrides)
        add_tokenizer(made, bos=base.startswith("llama"))
        shared.mkdir(exist_ok=True)
        with suppress(OSError):  # another process was faster
            made.rename(shared / family)

    def get(family: str) -> Path:
        if not (copies / family).exists():
            if not (shared / family).exists():
                make(family)
            shutil.copytree(shared / family, copies / family)
        return copies / family

    return get


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def returned_memory() -> Iterator[None]:
    """What a module has loaded and compiled is given back where that is much, so that a worker stays below 3 GB."""
    yield
    if sys.platform == "linux" and resident_bytes() < 1 << 30:
        return
    gc.collect()
    if "jax" in sys.modules:
        import jax

        jax.clear_caches()  # type: ignore[no-untyped-call]
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def reference_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Reference]:
    pytest.importorskip("torch")
    from tests.reference import Reference

    loaded: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in loaded:
            loaded[family] = Reference.load(checkpoint_of(family))
        return loaded[family]

    return get


def compiler_options() -> str:
    """What decides what JAX compiles, beside the options of a scorer."""
    from prefixwise.backends.jax.programs import COMPILER_OPTIONS

    return str(COMPILER_OPTIONS)


@pytest.fixture(scope="module")
def scorer_of(checkpoint_of: Callable[[str], Path]) -> Iterator[Callable[..., Scorer]]:
    """A scorer by family and options, loaded once for a module; those that only plan differently share a backend.

    So a program that JAX has compiled serves them all.
    """
    loaded: dict[tuple[object, ...], Scorer] = {}

    def load(family: str, options: dict[str, Any]) -> Scorer:
        key = (family, compiler_options() if options.get("backend") == "jax" else "", *sorted(options.items()))
        if key not in loaded:
            for other in [each for each in loaded if each[0] == family == "embedded"]:  # large: one at a time
                loaded.pop(other).close()
            loaded[key] = Scorer(None if family == "embedded" else checkpoint_of(family), **options)
        return loaded[key]

    def get(family: str, **options: Any) -> Scorer:
        plan = {name: options.pop(name) for name in PLAN_OPTIONS if name in options}
        if options.get("device") == "cuda":  # which many scorers, of several processes, share
            options.setdefault("prefix_cache_bytes", 1 << 28)
        elif options.get("backend") == "jax":  # which takes all of it at once
            num_devices = options.get("tp_size", 1) * options.get("dp_size", 1)
            options.setdefault("prefix_cache_bytes", (1 << 26) // num_devices)
        scorer = copy(load(family, {"dtype": "float32", **options}))
        config = replace(scorer.engine.config, plan=PlanOptions(**plan))
        scorer.engine = ScoringEngine(config, scorer.engine.scheduler, scorer.engine.tokenizer)
        return scorer

    yield get
    while loaded:
        loaded.popitem()[1].close()
