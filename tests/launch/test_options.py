"""`EngineOptions`: what is legal, where each option goes, and that `Scorer` offers the same ones."""

from __future__ import annotations

import gc
import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixwise import Scorer
from prefixwise.contract.errors import BackendError, InvalidValueError, ModelLoadError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.admission import DEFAULT_MAX_QUEUED_TOKENS
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.backend import DEFAULT_TOKEN_BUDGETS, BackendOptions
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.launch.loading import OnProgram, load_engine, resolved_config
from prefixwise.launch.options import EngineOptions
from prefixwise.models.sources import embedded_model_path
from prefixwise.plan.algorithms import PlanOptions
from prefixwise.prompts.profile_choice import profile_of_any_model
from tests.checkpoints import add_tokenizer

# A value for every option that is not its default.
OTHERS: dict[str, Any] = {
    "model": "some/model",
    "backend": "jax",
    "device": "cuda:1",
    "dtype": "float16",
    "tp_size": 2,
    "dp_size": 3,
    "nnodes": 2,
    "node_rank": 1,
    "dist_init_addr": "10.0.0.1:5000",
    "batch_invariant": True,
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e4m3",
    "prefix_attention_dtype": "fp8",
    "attention": "xla",
    "warmup": "fast",
    "compilation_cache_dir": Path("cache"),
    "weight_cache": False,
    "prefix_cache_bytes": 4,
    "prefix_cache": False,
    "chunked_prefill_size": 5,
    "max_queued_tokens": 6,
    "watchdog_timeout": 6.5,
    "algorithm": "packed",
    "mask": "dense",
    "segment_fallback_threshold": 7,
    "chunk_size": 0,
    "token_budget": 8,
    "delimiter_token_id": 0,
    "max_items_per_request": 9,
    "profile": "chat-yes-no",
    "served_names": ("a", "b"),
}
# These do not go with FP8 and several nodes.
LORAS: dict[str, Any] = {"lora": ("first=/one", "second=/two"), "max_loras": 3, "max_lora_rank": 8}
# A scorer takes what its caller sends and waits as long as that takes; it has one model, whose name is its own. Ranks
# other than 0 are servers.
NOT_OF_A_SCORER = {"max_queued_tokens", "watchdog_timeout", "served_names", "nnodes", "node_rank", "dist_init_addr"}
NOT_OF_A_SCORER |= {"lora"}  # it takes them as a mapping: tests/test_lora.py
NOT_OF_AN_ENGINE = {"on_program", "lora"}  # a callback, and that mapping


def defaults() -> dict[str, object]:
    return {field.name: field.default for field in fields(EngineOptions)}


def test_every_option_has_a_default_and_another_value_here() -> None:
    others = {**OTHERS, **LORAS}
    assert others.keys() == defaults().keys()
    assert MISSING not in defaults().values()
    assert all(value != defaults()[name] for name, value in others.items())


def test_every_option_reaches_the_part_that_it_shapes() -> None:
    options = EngineOptions(**OTHERS)
    assert options.backend_options() == BackendOptions(
        backend="jax",
        device="cuda:1",
        dtype="float16",
        tp_size=2,
        dp_size=3,
        nnodes=2,
        node_rank=1,
        dist_init_addr="10.0.0.1:5000",
        batch_invariant=True,
        quantization="fp8",
        kv_cache_dtype="fp8_e4m3",
        prefix_attention_dtype="fp8",
        token_budget=8,
        attention="xla",
        prefix_cache_bytes=4,
        compilation_cache_dir="cache",
        weight_cache=False,
        warmup="fast",
    )
    assert EngineOptions(**LORAS).backend_options() == BackendOptions(max_loras=3, max_lora_rank=8)
    assert EngineOptions(lora=LORAS["lora"]).backend_options() == BackendOptions(max_loras=2, max_lora_rank=16)
    plan = PlanOptions(algorithm="packed", chunk_size=0, mask="dense", segment_fallback_threshold=7, token_budget=8)
    assert options.plan_options() == plan
    assert options.scheduler_options() == SchedulerOptions(
        prefix_cache=False, chunked_prefill_size=5, max_queued_tokens=6, watchdog_timeout=6.5
    )
    others = ("b", "own name", "some/model", "model")
    profiles = profile_of_any_model("own name")
    config = options.engine_config("own name", profiles)
    assert config == EngineConfig("a", 0, 9, plan, served_names=others, profiles=profiles)


def test_the_defaults_are_those_of_the_parts() -> None:
    options = EngineOptions()
    assert options.backend_options() == BackendOptions()
    assert options.plan_options() == PlanOptions()
    assert options.scheduler_options() == SchedulerOptions()
    assert options.engine_config("m", profile_of_any_model()) == EngineConfig("m")


def test_no_bound_on_a_prefill_is_spelled_in_two_ways() -> None:
    assert EngineOptions(chunked_prefill_size=-1).scheduler_options() == EngineOptions().scheduler_options()


@pytest.mark.parametrize(
    ("model", "served", "names"),
    [
        ("Qwen/Qwen3-0.6B", (), ("own", "Qwen/Qwen3-0.6B", "Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B", ("mine",), ("mine", "own", "Qwen/Qwen3-0.6B", "Qwen3-0.6B")),
        (Path("/models/small.gguf"), (), ("own", "/models/small.gguf", "small.gguf")),
        ("own", (), ("own",)),
        (None, (), ("own",)),
        (".", (), ("own", ".")),
    ],
)
def test_a_model_goes_by_its_path_and_its_base_name_too(
    model: str | Path | None, served: tuple[str, ...], names: tuple[str, ...]
) -> None:
    config = EngineOptions(model, served_names=served).engine_config("own", profile_of_any_model())
    assert (config.model_name, config.served_names) == (names[0], names[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": "no"}, "prefix_cache must be True or False, got 'no'"),
        ({"weight_cache": "off"}, "weight_cache must be True or False, got 'off'"),
        ({"model": 3}, "model must be a folder, a .gguf file, a hub id or None, got 3"),
        ({"compilation_cache_dir": 3}, "compilation_cache_dir must be a folder or None, got 3"),
        ({"batch_invariant": "yes"}, "batch_invariant must be True, False or None, got 'yes'"),
        ({"prefix_cache_bytes": 0}, "prefix_cache_bytes must be a whole number of at least 1 byte, or None, got 0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size must be a whole number of at least 1 token, or -1"),
        ({"chunked_prefill_size": -2}, "chunked_prefill_size must be a whole number of at least 1 token, or -1"),
        ({"chunked_prefill_size": 2.0}, "chunked_prefill_size must be a whole number of at least 1 token, or -1"),
        ({"max_queued_tokens": 0}, "max_queued_tokens must be a whole number of at least 1 token, or None, got 0"),
        ({"max_queued_tokens": True}, "max_queued_tokens must be a whole number of at least 1 token, or None"),
        ({"delimiter_token_id": -1}, "delimiter_token_id must be a token id of 0 or more, or None, got -1"),
        ({"max_items_per_request": 0}, "max_items_per_request must be a whole number of at least 1 item, got 0"),
        ({"max_items_per_request": None}, "max_items_per_request must be a whole number of at least 1 item, got None"),
        ({"served_names": "name"}, "served_names must be a tuple of names, none of them empty, got 'name'"),
        ({"served_names": ("a", " ")}, "served_names must be a tuple of names, none of them empty"),
        ({"lora": ("no folder",)}, "lora must be a tuple of NAME=FOLDER, each name once"),
        ({"lora": ("a=/one", "a=/two")}, "lora must be a tuple of NAME=FOLDER, each name once"),
        (
            {"max_loras": 1, "lora": ("a=/one", "b=/two")},
            "max_loras must be a whole number of at least 0 and of at least as many as are loaded at start",
        ),
        ({"max_lora_rank": 65}, "max_lora_rank must be a whole number from 1 to 64, or None, got 65"),
        ({"chunk_size": -1}, "chunk_size must be a whole number of 0 or more items, got -1"),
        ({"mask": "none"}, "mask must be auto, dense or segment, got 'none'"),
    ],
)
def test_an_illegal_value_says_what_is_expected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        EngineOptions(**options)
    assert str(caught.value).startswith(message)
    assert caught.value.param == next(iter(options))


def test_what_no_backend_takes_is_an_error_before_a_model_is_looked_for() -> None:
    with pytest.raises(BackendError, match="tp_size must be a whole number of at least 1, got 0"):
        EngineOptions("no such model", tp_size=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device", torch.device("cpu"), "device must be a string like 'cuda:1', got device(type='cpu')"),
        ("device", None, "device must be a string like 'cuda:1', got None"),
        ("dtype", torch.float32, "dtype must be a string like 'float32', got torch.float32"),
    ],
)
def test_devices_and_dtypes_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(BackendError, match=re.escape(message)):
        EngineOptions(**{name: value})


class TestScorer:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lora": ["a"]}, "lora must be a mapping of names to folders, or None, got ['a']"),
            ({"on_program": 3}, "on_program must be a function or None, got 3"),
        ],
    )
    def test_what_it_passes_on_is_of_the_right_type(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidValueError, match=re.escape(message)):
            Scorer("no such model", **options)

    def test_its_options_are_the_engine_s(self) -> None:
        parameters = inspect.signature(Scorer).parameters
        offered = {name: each.default for name, each in parameters.items() if name not in NOT_OF_AN_ENGINE}
        assert offered == {name: value for name, value in defaults().items() if name not in NOT_OF_A_SCORER}

    def test_every_option_is_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[EngineOptions] = []

        def load_engine(options: EngineOptions, on_program: OnProgram | None) -> ScoringEngine:
            asked.append(options)
            raise KeyboardInterrupt  # seen enough

        monkeypatch.setattr("prefixwise.scorer.load_engine", load_engine)
        given = {name: value for name, value in OTHERS.items() if name not in NOT_OF_A_SCORER}
        with pytest.raises(KeyboardInterrupt):
            Scorer(**given)
        assert asked == [EngineOptions(**given, max_queued_tokens=sys.maxsize)]
        assert asked[0].served_names == ()

    def test_one_that_is_forgotten_gives_its_model_back(self, checkpoint_of: Callable[[str], Path]) -> None:
        scorer = Scorer(checkpoint_of("llama"), dtype="float32")
        assert scorer.score([1], [[2]], label_token_ids=[3]).scores
        engine = scorer.engine
        del scorer
        gc.collect()
        with pytest.raises(BackendError, match="this scorer is closed"):
            engine.score(parse_score_request({"query": [1], "items": [[2]], "label_token_ids": [3]}))


class TestLoading:
    def test_what_fails_half_way_leaves_nothing_behind(
        self, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[Scheduler] = []
        close = Scheduler.close

        def recorded_close(scheduler: Scheduler) -> None:
            closed.append(scheduler)
            close(scheduler)

        monkeypatch.setattr(Scheduler, "close", recorded_close)
        with pytest.raises(InvalidValueError, match="delimiter_token_id must be a token id from 0"):
            load_engine(EngineOptions(checkpoint_of("llama"), delimiter_token_id=10**6))
        assert len(closed) == 1

    def test_the_resolved_configuration_leaves_nothing_open(self, checkpoint_of: Callable[[str], Path]) -> None:
        options = EngineOptions(checkpoint_of("llama"), backend="torch", device="cpu", served_names=("mine",))
        engine = load_engine(options)
        config = resolved_config(options, engine)
        engine.close()
        assert json.loads(json.dumps(config)) == config
        assert defaults().keys() <= config.keys()
        assert "auto" not in {config[name] for name in ("backend", "device", "dtype")}
        assert config["kv_cache_dtype"] == config["prefix_attention_dtype"] == config["compute_dtype"]
        settled = ("model", "backend", "device_kind", "model_name", "token_budget", "max_queued_tokens")
        assert {name: config[name] for name in settled} == {
            "model": str(checkpoint_of("llama")),
            "backend": "torch",
            "device_kind": "cpu",
            "model_name": "mine",
            "token_budget": DEFAULT_TOKEN_BUDGETS["cpu"],
            "max_queued_tokens": DEFAULT_MAX_QUEUED_TOKENS["cpu"],
        }
        assert config["served_names"] == ["mine", str(checkpoint_of("llama")), "llama"]
        assert config["prefix_cache_tokens"] == engine.backend.info.num_kv_blocks * KV_BLOCK_SIZE

    def test_a_damaged_tokenizer_stops_the_start(self, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
        for file in checkpoint_of("llama").iterdir():
            (tmp_path / file.name).symlink_to(file)
        file = tmp_path / "tokenizer.json"
        file.unlink(missing_ok=True)
        file.write_text('{"version": "1.0", "model": ')
        options = EngineOptions(tmp_path, backend="torch", device="cpu", warmup="none")
        with pytest.raises(ModelLoadError, match=r"tokenizer.json cannot be read: EOF while parsing"):
            load_engine(options)

    def test_a_tokenizer_of_another_model_stops_the_start(
        self, checkpoint_of: Callable[[str], Path], tmp_path: Path
    ) -> None:
        for file in checkpoint_of("llama").iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        tokenizer = json.loads((add_tokenizer(tmp_path / "other", bos=True) / "tokenizer.json").read_text())
        tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"] = [100_000]
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ModelLoadError, match=r"puts the id 100000 around every text, but the model has \d+ tokens"):
            load_engine(EngineOptions(tmp_path, backend="torch", device="cpu", warmup="none"))

    def test_the_revision_of_a_model_from_the_hub_is_recorded(
        self, checkpoint_of: Callable[[str], Path], tmp_path: Path
    ) -> None:
        snapshot = tmp_path / "models--a--b" / "snapshots" / ("c" * 40)
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(checkpoint_of("llama"))
        options = EngineOptions(snapshot, backend="torch", device="cpu", warmup="none")
        engine = load_engine(options)
        engine.close()
        assert resolved_config(options, engine)["revision"] == "c" * 40

    def test_the_embedded_model_is_named_by_its_file(self) -> None:
        options = EngineOptions(backend="torch", device="cpu")
        engine = load_engine(options)
        config = resolved_config(options, engine)
        engine.close()
        assert config["model"] == str(embedded_model_path())
        assert config["model_name"] == embedded_model_path().stem
