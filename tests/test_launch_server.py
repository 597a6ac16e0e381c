"""`python -m prefixwise.launch_server` and `prefixwise serve`: from a command line to what the server is started with.

Arguments are parsed by the real program; only the model and the server itself are left out.
"""

from __future__ import annotations

import json
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from prefixwise.backends.jax.attention.api import IMPLEMENTATIONS
from prefixwise.cli import sglang_flags
from prefixwise.cli.main import app, main
from prefixwise.cli.serve import OUR_ATTENTIONS
from prefixwise.host import install_command
from prefixwise.launch.loading import OnProgram
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions
from tests.cli.conftest import run_process

COMMANDS = (Path(__file__).parent / "fixtures" / "earlier_launch_commands.txt").read_text(encoding="utf-8")
NO_FA = f"--attention-backend fa (ours are {', '.join(IMPLEMENTATIONS)})"
NO_REMOTE_CODE = "accepted without effect: --trust-remote-code (no code from a checkpoint is ever run)"

DEFAULT_ENGINE = EngineOptions(warmup="full", watchdog_timeout=300.0)
QWEN = replace(DEFAULT_ENGINE, model="Qwen/Qwen3-0.6B", tp_size=1)
MULTI_ITEM = replace(QWEN, delimiter_token_id=151643, prefix_cache=False, chunked_prefill_size=-1)
BFLOAT16 = replace(MULTI_ITEM, dtype="bfloat16", mask="auto", segment_fallback_threshold=32768)
# What the commands of the file say, one by one: the engine, the port, and what is logged.
MEANT: list[tuple[EngineOptions, int, list[str]]] = [
    (replace(BFLOAT16, chunk_size=500), 30010, [f"{NO_REMOTE_CODE}, {NO_FA}"]),
    (replace(BFLOAT16, chunk_size=64), 30011, [f"{NO_REMOTE_CODE}, {NO_FA}"]),
    (MULTI_ITEM, 30020, [NO_REMOTE_CODE]),
    (replace(BFLOAT16, chunk_size=2), 30010, [f"{NO_REMOTE_CODE}, {NO_FA}"]),
    (replace(QWEN, dtype="bfloat16"), 30011, [f"{NO_REMOTE_CODE}, {NO_FA}"]),
]

# One use of every flag that the design names, and of the other spellings.
ENGINE_FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("--lora a=/b --lora c=/d", {"lora": ("a=/b", "c=/d")}),
    ("--lora-modules a=/b", {"lora": ("a=/b",)}),
    ("--lora-paths a=/b", {"lora": ("a=/b",)}),
    ("--lora-paths a=/b c=/d --max-loras 2", {"lora": ("a=/b", "c=/d"), "max_loras": 2}),
    ("--max-loras 3", {"max_loras": 3}),
    ("--max-lora-rank 32", {"max_lora_rank": 32}),
    (
        "--nnodes 2 --node-rank 0 --dist-init-addr a:1 --tp-size 2",
        {"nnodes": 2, "dist_init_addr": "a:1", "tp_size": 2},
    ),
    ("--model-path some/model", {"model": "some/model"}),
    ("--model some/model", {"model": "some/model"}),
    ("some/model", {"model": "some/model"}),
    ("some/model --revision v1", {"model": "some/model@v1"}),
    ("--dtype half some/model", {"dtype": "float16", "model": "some/model"}),
    ("--log-level info --mask segment mask --revision v1", {"mask": "segment", "model": "mask@v1"}),
    ("--no-batch-invariant --tp=2 --dp 2 a=b", {"batch_invariant": False, "tp_size": 2, "dp_size": 2, "model": "a=b"}),
    ("--dtype float16", {"dtype": "float16"}),
    ("--dtype half", {"dtype": "float16"}),
    ("--dtype float", {"dtype": "float32"}),
    ("--tp-size 2", {"tp_size": 2}),
    ("--dp-size 2", {"dp_size": 2}),
    ("--tensor-parallel-size 2", {"tp_size": 2}),
    ("--tp=2", {"tp_size": 2}),
    ("--data-parallel-size=2", {"dp_size": 2}),
    ("--max-multi-item-count 9", {"max_items_per_request": 9}),
    ("--revision v1 --model-path some/model", {"model": "some/model@v1"}),
    ("--model=some/model --revision=v1", {"model": "some/model@v1"}),
    ("--skip-server-warmup", {"warmup": "none"}),
    ("--enable-deterministic-inference", {"batch_invariant": True}),
    ("--multi-item-enable-prefill-extend", {"algorithm": "prefill_extend"}),
    ("--multi-item-scoring-delimiter 0", {"delimiter_token_id": 0}),
    ("--delimiter-token-id 5", {"delimiter_token_id": 5}),
    ("--multi-item-scoring-chunk-size=2", {"chunk_size": 2}),
    ("--chunk-size 0", {"chunk_size": 0}),
    ("--multi-item-mask-impl dense", {"mask": "dense"}),
    ("--mask segment", {"mask": "segment"}),
    ("--multi-item-segment-fallback-threshold 9", {"segment_fallback_threshold": 9}),
    ("--segment-fallback-threshold=8", {"segment_fallback_threshold": 8}),
    ("--disable-radix-cache", {"prefix_cache": False}),
    ("--chunked-prefill-size 4096", {"chunked_prefill_size": 4096}),
    ("--attention-backend xla", {"attention": "xla"}),
    ("--attention reference", {"attention": "reference"}),
    ("--backend jax", {"backend": "jax"}),
    ("--device cuda:1", {"device": "cuda:1"}),
    ("--algorithm packed", {"algorithm": "packed"}),
    ("--token-budget 77", {"token_budget": 77}),
    ("--no-weight-cache", {"weight_cache": False}),
    ("--prefix-cache-bytes 1000", {"prefix_cache_bytes": 1000}),
    ("--max-queued-tokens 12", {"max_queued_tokens": 12}),
    ("--watchdog-timeout 7.5", {"watchdog_timeout": 7.5}),
    ("--max-items-per-request 13", {"max_items_per_request": 13}),
    ("--batch-invariant", {"batch_invariant": True}),
    ("--no-batch-invariant", {"batch_invariant": False}),
    ("--quantization fp8", {"quantization": "fp8"}),
    ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
    ("--prefix-attention-dtype fp8", {"prefix_attention_dtype": "fp8"}),
    ("--warmup fast", {"warmup": "fast"}),
    ("--compilation-cache-dir folder", {"compilation_cache_dir": "folder"}),
    ("--profile mine.toml", {"profile": "mine.toml"}),
]
SERVER_FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("--otlp-traces-endpoint http://a:4318/v1/traces", {"otlp_traces_endpoint": "http://a:4318/v1/traces"}),
    ("--host 0.0.0.0", {"host": "0.0.0.0"}),
    ("--max-connections 9", {"max_connections": 9}),
    ("--max-connections-per-address 9", {"max_connections_per_address": 9}),
    ("--max-pipelined-requests 0", {"max_pipelined_requests": 0}),
    ("--max-headers 9", {"max_headers": 9}),
    ("--max-header-bytes 999", {"max_header_bytes": 999}),
    ("--header-timeout 0.5", {"header_timeout": 0.5}),
    ("--idle-timeout 0.5", {"idle_timeout": 0.5}),
    ("--min-transfer-rate 0", {"min_transfer_rate": 0}),
    ("--keep-alive-timeout 0.5", {"keep_alive_timeout": 0.5}),
    ("--port 0", {"port": 0}),
    ("--api-key secret", {"api_key": "secret"}),
    ("--max-request-bytes 14", {"max_request_bytes": 14}),
    ("--max-response-bytes 15", {"max_response_bytes": 15}),
    ("--max-body-memory 999999999", {"max_body_memory": 999_999_999}),
    ("--request-timeout 1.5", {"request_timeout": 1.5}),
    ("--shutdown-grace 0", {"shutdown_grace": 0.0}),
    ("--cors-origin https://a.org --cors-origin *", {"cors_origins": ("https://a.org", "*")}),
    ("--log-level debug", {"log_level": "debug"}),
    ("--log-json", {"log_json": True}),
    ("--strict-model", {"strict_model": True}),
    ("--auto-truncate false", {"auto_truncate": False}),
    ("--rerank-format sglang", {"rerank_format": "sglang"}),
    ("--reports-dir .", {"reports_dir": "."}),
    ("--http-workers 3", {"http_workers": 3}),
    ("--tokenizer-worker-num 3", {"http_workers": 3}),
    ("--api-server-count=3", {"http_workers": 3}),
]


# The exit status of a process for each of the packages that are its arguments, in which that one cannot be imported.
SERVE_WITHOUT_EACH = """
import os, sys
from prefixwise.cli.main import main
for package in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.modules[package] = None
        main(["serve", "--port", "0", "--model", "no such model"])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Started:
    """What the server would have been started with."""

    engine: EngineOptions
    server: ServerOptions


Launch = Callable[..., Started]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """Servers that were asked for, none of which runs."""
    found: list[Started] = []

    def run_server(options: ServerOptions, open_engine: Callable[..., Any], *others: Any, **more: Any) -> None:
        found.append(Started(open_engine(), options))

    monkeypatch.delenv("PREFIXWISE_API_KEY", raising=False)
    monkeypatch.setattr("prefixwise.server.launch.run_server", run_server)
    monkeypatch.setattr("prefixwise.server.workers.supervisor.run_workers", run_server)
    monkeypatch.setattr("prefixwise.cli.serve.has_accelerator", lambda: False)
    monkeypatch.setattr("prefixwise.cli.serve.open_engine_to_serve", lambda options, on_program: options)
    monkeypatch.setattr("prefixwise.server.logs.set_up_logging", lambda options: None)  # it would silence caplog
    return found


@pytest.fixture
def launch(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs `python -m prefixwise.launch_server` in this process."""

    def run(*args: str) -> Started:
        monkeypatch.setattr(sys, "argv", ["launch_server", *args])
        with pytest.raises(SystemExit) as exited:
            runpy.run_module("prefixwise.launch_server", run_name="__main__")
        assert exited.value.code == 0
        return started.pop()

    return run


def parse_command(command: str) -> tuple[str, list[str]]:
    """The module and its arguments, as a shell would read them: without `nohup` and what follows the `>`."""
    words = shlex.split(command.replace("\\\n", " "))
    begin, end = words.index("-m"), words.index(">")
    return words[begin + 1], words[begin + 2 : end]


class TestOriginCommands:
    def test_there_are_as_many_as_expected(self) -> None:
        modules = [parse_command(command)[0] for command in COMMANDS.split("\n\n")]
        assert modules == [
            "sgl_jax.launch_server",
            "sgl_jax.launch_server",
            "sglang.launch_server",
            "sgl_jax.launch_server",
            "sgl_jax.launch_server",
        ]

    @pytest.mark.parametrize(("command", "meant"), list(zip(COMMANDS.split("\n\n"), MEANT, strict=True)))
    def test_a_command_means_here_what_it_says(
        self,
        launch: Launch,
        caplog: pytest.LogCaptureFixture,
        command: str,
        meant: tuple[EngineOptions, int, list[str]],
    ) -> None:
        engine, port, logged = meant
        _, args = parse_command(command)
        assert launch(*args) == Started(engine, ServerOptions(host="0.0.0.0", port=port))
        *messages, warning = (record.getMessage() for record in caplog.records)
        assert messages == logged
        assert warning.startswith(f"--host 0.0.0.0 without an API key: every machine that reaches port {port} ")

    def test_minus_one_is_no_bound_on_a_prefill(self) -> None:
        assert MULTI_ITEM.scheduler_options().chunked_prefill_size is None
        assert MULTI_ITEM.scheduler_options().prefix_cache is False


class TestFlags:
    def test_without_any_it_serves_the_embedded_model_on_this_machine_alone(self, launch: Launch) -> None:
        assert launch() == Started(DEFAULT_ENGINE, ServerOptions(host="127.0.0.1", port=30_000))

    @pytest.mark.parametrize(("args", "effect"), ENGINE_FLAGS)
    def test_a_flag_of_the_engine(
        self, launch: Launch, caplog: pytest.LogCaptureFixture, args: str, effect: dict[str, Any]
    ) -> None:
        found = launch(*args.split(), "--http-workers", "0")  # whatever the device
        assert found == Started(replace(DEFAULT_ENGINE, **effect), ServerOptions())
        assert replace(DEFAULT_ENGINE, **effect) != DEFAULT_ENGINE
        assert caplog.messages == []

    @pytest.mark.parametrize(("args", "effect"), SERVER_FLAGS)
    def test_a_flag_of_the_server(self, launch: Launch, args: str, effect: dict[str, Any]) -> None:
        assert launch(*args.split()) == Started(DEFAULT_ENGINE, replace(ServerOptions(), **effect))
        assert replace(ServerOptions(), **effect) != ServerOptions()

    @pytest.mark.parametrize(("args", "room"), [("", 1), ("--max-loras 0", 0), ("--lora a=b", 2)])
    def test_adapters_that_are_loaded_later_have_room(self, launch: Launch, args: str, room: int) -> None:
        found = launch("--allow-runtime-lora-updating", *args.split())
        assert found.server.allow_runtime_lora_updating
        assert found.engine.max_loras == room

    def test_served_names_reach_engine_and_server(self, launch: Launch) -> None:
        for args in (("--served-model-name", "a", "--served-model-name", "b/c"), ("--served-model-name", "a", "b/c")):
            found = launch(*args)
            assert found.engine.served_names == found.server.served_model_names == ("a", "b/c")

    def test_the_last_of_two_spellings_counts(self, launch: Launch) -> None:
        assert launch("--mask", "dense", "--multi-item-mask-impl", "segment").engine.mask == "segment"
        assert launch("--multi-item-mask-impl", "segment", "--mask", "dense").engine.mask == "dense"

    def test_every_field_is_set_by_some_flag(self) -> None:
        tested = {name for _, effect in [*ENGINE_FLAGS, *SERVER_FLAGS] for name in effect}
        fields = vars(EngineOptions()).keys() | vars(ServerOptions()).keys()
        others = {"served_names", "served_model_names", "allow_runtime_lora_updating"}
        assert fields - tested == {*others, "node_rank"}  # ranks but 0 start no server

    def test_warm_up_is_told_in_about_ten_lines(
        self, monkeypatch: pytest.MonkeyPatch, launch: Launch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def load_engine(options: EngineOptions, on_program: OnProgram) -> EngineOptions:
            for done in range(25):
                on_program(done, 25, f"program {done}")
            return options

        monkeypatch.setattr("prefixwise.cli.serve.open_engine_to_serve", load_engine)
        caplog.set_level("INFO", "prefixwise")
        launch()
        assert len(caplog.messages) == 8
        assert caplog.messages[-1] == "warm-up: 24 of 25 programs compiled; next: program 24"

    def test_log_level_may_stand_before_the_verb(self, started: list[Started]) -> None:
        for args, level in [
            (["--log-level", "error", "serve"], "error"),
            (["--log-level", "error", "serve", "--log-level", "debug"], "debug"),
            (["serve"], "info"),
        ]:
            with pytest.raises(SystemExit):
                main(args)
            assert started.pop().server.log_level == level


class TestWithoutEffect:
    @pytest.mark.parametrize("name", ["fa", "fa3", "flashinfer", "triton", "native", "torch_native"])
    def test_attention_of_a_peer_is_left_to_us(
        self, launch: Launch, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        assert launch("--attention-backend", name).engine.attention is None
        assert caplog.messages == ["accepted without effect: " + NO_FA.replace(" fa ", f" {name} ")]

    def test_the_others_of_sglang_are_named_in_one_line(self, launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
        """As its documentation launches a server for multi-item scoring, with a few more."""
        line = (
            "--model-path Qwen/Qwen3-0.6B --tokenizer-path Qwen/Qwen3-0.6B --tp 1 --enable-mis --pp-size 1 "
            "--attention-backend flashinfer --mem-fraction-static=0.8 --max-running-requests 8 "
            "--cuda-graph-bs 1 2 4 --disable-cuda-graph --trust-remote-code --dist-init-addr a:1 --port 1"
        )
        assert launch(*line.split()) == Started(replace(QWEN, dist_init_addr="a:1"), ServerOptions(port=1))
        assert caplog.messages == [
            "accepted without effect: --tokenizer-path Qwen/Qwen3-0.6B, --pp-size 1, --mem-fraction-static 0.8, "
            "--max-running-requests 8, --cuda-graph-bs 1 2 4, --disable-cuda-graph, --enable-mis (always so here), "
            f"--trust-remote-code (no code from a checkpoint is ever run), {NO_FA.replace(' fa ', ' flashinfer ')}, "
            "--dist-init-addr a:1 (without --nnodes)"
        ]

    def test_a_model_may_follow_flags_of_sglang(self, launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
        line = "--tokenizer-path Qwen/Qwen3-0.6B --auto-truncate true --page-size 1 --enable-mis Qwen/Qwen3-0.6B"
        assert launch(*line.split(), "--tp-size", "1").engine == QWEN
        assert caplog.messages == [
            "accepted without effect: --tokenizer-path Qwen/Qwen3-0.6B, --page-size 1, --enable-mis (always so here)"
        ]

    def test_a_model_may_follow_a_list_of_numbers(self, launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
        line = "--cuda-graph-bs 1 2 Qwen/Qwen3-0.6B --bucket-time-to-first-token 0.1 1e3 --tp-size 1"
        assert launch(*line.split()).engine == QWEN
        assert caplog.messages == ["accepted without effect: --cuda-graph-bs 1 2, --bucket-time-to-first-token 0.1 1e3"]

    def test_no_flag_is_both_ours_and_another_servers(self) -> None:
        table = tomllib.loads(Path(sglang_flags.__file__).with_suffix(".toml").read_text(encoding="utf-8"))
        groups = [table["same"], table["means"], table["refused"], table["always"]["switches"]]
        names = [name for group in (*groups, *table["without_effect"].values()) for name in group]
        ours = {name for each in get_command(app).commands["serve"].params for name in each.opts}  # type: ignore[attr-defined]
        assert len(set(names)) == len(names) > 500
        of_serve = {"--nnodes", "--node-rank", "--dist-init-addr"}  # `cluster` has not these
        assert ours & set(names) == of_serve
        assert set(table["same"].values()) <= ours
        assert {args[0] for args in table["means"].values()} <= ours

    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            ("", True),
            ("--auto-truncate", True),
            ("--auto-truncate true", True),
            ("--auto-truncate=false", False),
            ("--no-auto-truncate", False),
            ("--auto-truncate false --auto-truncate", True),
        ],
    )
    def test_auto_truncate_may_have_a_value(self, launch: Launch, args: str, expected: bool) -> None:
        assert launch(*args.split()).server.auto_truncate is expected

    def test_the_lines_are_in_the_format_of_the_server_s_log(self) -> None:
        args = ("--log-json", "--trust-remote-code", "--model-path", "no such model", "--port", "0")
        ran = run_process([sys.executable, "-m", "prefixwise.launch_server", *args])
        records = [json.loads(line) for line in ran.err.splitlines() if line.startswith("{")]
        assert (records[0]["level"], records[0]["message"]) == ("WARNING", NO_REMOTE_CODE)
        assert "error: no model at 'no such model'" in ran.err
        assert (ran.status, ran.out) == (1, "")

    def test_our_own_are_all_known(self) -> None:
        assert OUR_ATTENTIONS == IMPLEMENTATIONS


class TestErrors:
    @pytest.mark.parametrize(
        ("args", "error"),
        [
            ("--dtype int8", "Invalid value for '--dtype': Value error, 'int8' is not one of 'auto', 'float32'"),
            ("--backend tensorflow", "Invalid value for '--backend'"),
            ("--multi-item-mask-impl sparse", "Invalid value for '--multi-item-mask-impl'"),
            ("--mask sparse", "Invalid value for '--multi-item-mask-impl'"),
            ("--algorithm magic", "Invalid value for '--algorithm'"),
            ("--warmup hot", "Invalid value for '--warmup'"),
            ("--log-level loud", "Invalid value for '--log-level'"),
            ("--port http", "Invalid value for '--port'"),
            ("--tp-size 0", "Invalid value for '--tp-size'"),
            ("--chunked-prefill-size -2", "Invalid value for '--chunked-prefill-size'"),
            ("--max-walking-requests 4", "No such option: --max-walking-requests"),
            ("--max-running-requests four", "Invalid value for '--max-running-requests': expected an integer"),
            ("--mem-fraction-static=x", "Invalid value for '--mem-fraction-static': expected a number, got 'x'"),
            ("--cuda-graph-bs Qwen/Qwen3-0.6B", "Invalid value for '--cuda-graph-bs': expected a number, got 'Qwen/"),
            ("--cuda-graph-bs --port 1", "Option '--cuda-graph-bs' requires an argument."),
            ("--mem-fraction-static --port 1", "Option '--mem-fraction-static' requires an argument."),
            ("--enable-mis=1", "Option '--enable-mis' does not take a value, got '1'"),
            ("--tp two", "Invalid value for '--tp-size'"),
            ("a --model-path b", "expected the model once, got 'a' and --model-path"),
            ("--model-path=b --port 1 a", "expected the model once, got --model-path=b and 'a'"),
            ("a --port 1 b", "expected the model once, got 'a' and 'b'"),
            ("--strict-model true", "expected a model or an option, got 'true': a switch takes no value"),
            ("a --max-walking-requests 4", "No such option: --max-walking-requests"),
            ("--model-path a --tokenizer-path b", "--tokenizer-path b is not served: the checkpoint's own tokenizer"),
            ("--auto-truncate=maybe", "Invalid value for '--auto-truncate': expected true or false, got 'maybe'"),
            ("--rerank-format jina", "Invalid value for '--rerank-format'"),
            ("--chunked-prefill-size 0", "chunked_prefill_size must be a whole number of at least 1 token, or -1"),
            ("--port 65536", "port must be a whole number from 0 to 65535, got 65536"),
            ("--cors-origin a.org", 'cors_origins must be "*" or origins like https://example.org'),
            ("--request-timeout inf", "Invalid value for '--request-timeout': expected a finite number, got inf"),
        ],
    )
    def test_a_bad_value_is_one_line_and_a_hint(
        self, started: list[Started], capsys: pytest.CaptureFixture[str], args: str, error: str
    ) -> None:
        with pytest.raises(SystemExit) as exited:
            main(["serve", *args.split()])
        first, *rest = capsys.readouterr().err.splitlines()
        assert (exited.value.code, started) == (2, [])
        assert first.startswith(f"error: {error}")
        assert rest == ["hint: prefixwise serve --help lists the options"]

    def test_without_the_packages_of_the_server_it_says_how_to_install_them(self) -> None:
        packages = ("starlette", "uvicorn", "orjson")
        command = [sys.executable, "-c", SERVE_WITHOUT_EACH, *packages]
        ran = run_process(command)
        assert (ran.status, ran.out.split()) == (0, ["1"] * 3)
        hint = f"hint: install what the server needs with: {install_command('server')}"
        lines = [line for package in packages for line in (f"error: {package} is not installed", hint)]
        assert ran.err.splitlines() == lines


class TestApiKey:
    SECRET = "sesame-4711"

    @pytest.mark.parametrize(
        ("args", "warns"),
        [
            ([], False),
            (["--host", "localhost"], False),
            (["--host", "::1"], False),
            (["--host", "10.0.0.7"], True),
            (["--host", "0.0.0.0", "--api-key", SECRET], False),
        ],
    )
    def test_other_machines_without_a_key_are_a_warning(
        self, launch: Launch, caplog: pytest.LogCaptureFixture, args: list[str], warns: bool
    ) -> None:
        launch(*args)
        assert any("without an API key" in message for message in caplog.messages) == warns

    def test_it_may_come_from_the_environment(self, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFIXWISE_API_KEY", self.SECRET)
        assert launch().server.api_key == self.SECRET
        assert launch("--api-key", "another").server.api_key == "another"

    def test_an_empty_variable_is_an_error(
        self,
        launch: Launch,
        started: list[Started],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Not a server without a key: a secret that was not found is empty, too."""
        monkeypatch.setenv("PREFIXWISE_API_KEY", "")
        with pytest.raises(SystemExit) as exited:
            main(["serve"])
        assert (exited.value.code, started) == (2, [])
        assert capsys.readouterr().err.startswith("error: PREFIXWISE_API_KEY is set but empty\nhint: ")
        assert launch("--api-key", self.SECRET).server.api_key == self.SECRET

    @pytest.mark.parametrize("key", ["", " ", f" {SECRET}", f"{SECRET}\udcff", f"{SECRET}\x00", "a\nb"])
    def test_an_empty_one_is_an_error_and_none_is_shown(
        self, started: list[Started], capsys: pytest.CaptureFixture[str], key: str
    ) -> None:
        with pytest.raises(SystemExit) as exited:
            main(["serve", "--api-key", key])
        shown = capsys.readouterr().err
        assert (exited.value.code, started) == (2, [])
        assert shown.startswith("error: api_key must be one or more characters")
        assert self.SECRET not in shown

    def test_it_is_never_shown(
        self,
        launch: Launch,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("PREFIXWISE_API_KEY", self.SECRET)
        caplog.set_level("DEBUG")
        found = launch("--log-level", "debug", "--trust-remote-code")
        with pytest.raises(SystemExit):
            main(["serve", "--help"])
        assert caplog.messages == [NO_REMOTE_CODE]
        assert self.SECRET not in repr(found) + caplog.text + "".join(capsys.readouterr())
