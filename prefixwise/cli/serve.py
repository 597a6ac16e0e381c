"""`prefixwise serve`: the HTTP server. `python -m prefixwise.launch_server` is the same program.

The engine's options have SGLang's names; the names of `prefixwise score` are accepted too (SECOND_SPELLINGS).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from prefixwise.cli.engine_options import ENGINE_FLAGS, PROFILE_FLAG, open_engine_to_serve
from prefixwise.cli.failures import FAILED, CommandError, needing, print_error
from prefixwise.cli.flags import Flag, is_typed, with_flags
from prefixwise.cli.sglang_flags import Ignored, without_effect
from prefixwise.contract.errors import PrefixwiseError
from prefixwise.contract.request import Algorithm
from prefixwise.host import has_accelerator, install_command, num_cores
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import LogLevel, ReportSource, RerankFormat, ServerOptions, is_loopback

ENGINE_PANEL = "Model and engine"
SERVER_PANEL = "Server"

# SGLang's name for a field, as its runbooks use it.
_SGLANG_NAMES = {
    "model": "--model-path",
    "attention": "--attention-backend",
    "chunk_size": "--multi-item-scoring-chunk-size",
    "mask": "--multi-item-mask-impl",
    "segment_fallback_threshold": "--multi-item-segment-fallback-threshold",
    "delimiter_token_id": "--multi-item-scoring-delimiter",
}
SECOND_SPELLINGS = {f"--{field.replace('_', '-')}": name for field, name in _SGLANG_NAMES.items()}

# Names that other servers have for these types.
DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}
_DtypeName = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]


def first_spelling(token: str) -> str:
    """The option's first name, without dashes, for one given by its second name; any other token unchanged."""
    return SECOND_SPELLINGS.get(f"--{token}", f"--{token}").removeprefix("--")


def _renamed(field: str, flag: Flag) -> Flag:
    name = _SGLANG_NAMES.get(field)
    if name is None:
        return flag
    by_itself = ", or MODEL by itself" if field == "model" else ""
    return replace(flag, name=name, help=f"{flag.help} Also --{field.replace('_', '-')}{by_itself}.")


SERVE_ENGINE_FLAGS = {
    **{field: _renamed(field, flag) for field, flag in ENGINE_FLAGS.items()},
    "dtype": replace(ENGINE_FLAGS["dtype"], kind=_DtypeName),
    "profile": PROFILE_FLAG,
    "algorithm": Flag(
        Algorithm,
        f"The algorithm of requests that do not name one: {', '.join(get_args(Algorithm))}.",
        "NAME",
    ),
    "prefix_cache": Flag(
        bool, "Do not cache prefixes between requests.", "", name="--disable-radix-cache", turns_off=True
    ),
    "chunked_prefill_size": Flag(
        int | None, "Maximum tokens of one request's prefix in one step; -1: no separate limit.", least=-1
    ),
    "max_queued_tokens": Flag(
        int | None, "Maximum queued tokens; requests beyond are refused (429). Default: chosen for the device.", least=1
    ),
    "watchdog_timeout": Flag(
        float,
        "Seconds of a step after which the device counts as hung and the server exits; more for steps that usually "
        "take long; also how long an engine process may not answer; 0: never.",
        "SECONDS",
        least=0,
    ),
    "max_items_per_request": Flag(int, "Maximum items of one request.", least=1),
    "served_names": Flag(
        str,
        "A name of the model in requests; may be repeated. Responses use the first. "
        "The path as given and its base name are accepted too.",
        "NAME",
        name="--served-model-name",
        repeatable=True,
    ),
    "lora": Flag(
        str,
        "A LoRA adapter, which requests choose as their model: a name and a folder that peft has saved; may be "
        "repeated. Also --lora-modules and --lora-paths.",
        "NAME=FOLDER",
        other_names=("--lora-modules", "--lora-paths"),
        repeatable=True,
    ),
    "max_loras": Flag(
        int | None,
        "Maximum LoRA adapters that are loaded at a time; default: those of --lora, and one more with "
        "--allow-runtime-lora-updating.",
        least=0,
    ),
    "max_lora_rank": Flag(
        int | None, "Maximum rank of LoRA adapters, up to 64; default: the largest of --lora, at least 16.", least=1
    ),
}

# One model on several hosts; a replica of `cluster` is on one.
NODE_FLAGS = {
    "nnodes": Flag(int, "Hosts that share the model, each with this command (JAX); devices: --tp-size.", least=1),
    "node_rank": Flag(int, "The rank of this host, from 0; rank 0 serves HTTP, the others compute for it.", least=0),
    "dist_init_addr": Flag(
        str | None,
        "An address of rank 0 that all hosts reach, like 10.0.0.1:5000; the next port is used, too.",
        "HOST:PORT",
    ),
}

# Where a server differs from a program that scores once.
SERVE_DEFAULTS: dict[str, object] = {"warmup": "full", "watchdog_timeout": 300.0}

# What a client may cost before its request is read (server/http_protocol.py, server/connections.py).
CONNECTION_FLAGS = {
    "max_connections": Flag(
        int, "Maximum connections; fewer if the process may not open so many files (ulimit -n).", least=1
    ),
    "max_connections_per_address": Flag(int, "Maximum connections of one client address.", least=1),
    "max_pipelined_requests": Flag(int, "Maximum requests that wait behind another on one connection.", least=0),
    "max_headers": Flag(int, "Maximum headers of a request.", least=1),
    "max_header_bytes": Flag(int, "Maximum size of a request's headers.", least=1),
    "header_timeout": Flag(float, "Seconds for a request's headers to arrive, then 408.", "SECONDS"),
    "idle_timeout": Flag(
        float, "Seconds that a client may pause while it sends a body (then 408) or reads a response.", "SECONDS"
    ),
    "min_transfer_rate": Flag(
        int,
        "Bytes a second at which a client must send a body or read a response that takes longer; 0: any.",
        least=0,
    ),
    "keep_alive_timeout": Flag(float, "Seconds that a connection may be idle between requests.", "SECONDS"),
}

SERVER_FLAGS = {
    "host": Flag(str, "The address to listen on; 0.0.0.0: all of this machine.", "ADDRESS"),
    "port": Flag(int, "The port to listen on; 0: any free one.", least=0),
    "http_workers": Flag(
        int | None,
        "Processes for HTTP, JSON, tokenization and planning, beside that of the engine; 0: one process for all. "
        "Default: 0 on a CPU; on a GPU or TPU one for every 4 cores, up to 4. Also --tokenizer-worker-num and "
        "--api-server-count.",
        least=0,
    ),
    "api_key": Flag(
        str | None,
        "The bearer token that requests must carry; default: none.",
        "KEY",
        environment_variable="PREFIXWISE_API_KEY",
    ),
    "cors_origins": Flag(
        str,
        "A web origin that may send requests, or *; may be repeated.",
        "ORIGIN",
        name="--cors-origin",
        repeatable=True,
    ),
    "max_request_bytes": Flag(int, "Maximum size of a request body.", least=1),
    "max_response_bytes": Flag(
        int, "Maximum size of a response; a request that asks for more is refused before it is scored.", least=1
    ),
    "max_body_memory": Flag(
        int, "Maximum bytes of all bodies and responses in memory; requests beyond are refused (503).", least=1
    ),
    "request_timeout": Flag(
        float, "Seconds from a request's arrival to its response, then 504; 0: no limit.", "SECONDS", least=0
    ),
    "shutdown_grace": Flag(float, "Seconds for in-flight requests to finish on shutdown.", "SECONDS", least=0),
    "allow_runtime_lora_updating": Flag(
        bool, "Let clients load and unload LoRA adapters, from folders of this machine (/v1/load_lora_adapter).", ""
    ),
    "strict_model": Flag(bool, "Refuse rerank requests for a model that is not served, too.", ""),
    "auto_truncate": Flag(
        bool,
        "Requests in TEI's format that do not have `truncate`: refuse texts that do not fit, do not truncate them. "
        "Also --auto-truncate false; --auto-truncate or --auto-truncate true is the default.",
        "",
        name="--no-auto-truncate",
        turns_off=True,
    ),
    "rerank_format": Flag(
        RerankFormat,
        f"The format of responses of /v1/rerank, where the request's fields leave it open: "
        f"{', '.join(get_args(RerankFormat))}.",
        "NAME",
    ),
    "reports_dir": Flag(str | None, "A folder of benchmark artifacts, which /reports lists and shows.", "DIR"),
    "log_level": Flag(LogLevel, f"How much to log on stderr: {', '.join(get_args(LogLevel))}.", "NAME"),
    "log_json": Flag(bool, "One JSON object per line of the log.", ""),
    "otlp_traces_endpoint": Flag(
        str | None,
        "Send traces of requests to this OpenTelemetry collector, by OTLP over HTTP (http://127.0.0.1:4318/v1/traces).",
        "URL",
    ),
    **CONNECTION_FLAGS,
}

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        metavar="",
        help="Accepted without effect: no code from a checkpoint is ever run.",
        rich_help_panel=ENGINE_PANEL,
    ),
]

NEEDED_PACKAGES = ("pydantic",)  # of the extra `harness`


class LateReports:
    """A `ReportSource` of this folder, or only of uploaded files if None. The viewer is imported on first use."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @cached_property
    def _source(self) -> ReportSource:
        from prefixwise.bench.run.report import ReportFolder

        return ReportFolder(self._folder)

    def artifacts(self) -> Sequence[Mapping[str, object]]:
        return self._source.artifacts()

    def page(self, name: str) -> str:
        return self._source.page(name)

    def page_of(self, content: bytes, name: str) -> str:
        return self._source.page_of(content, name)


log = logging.getLogger("prefixwise")

# Values of `--attention-backend` that are ours; any other is another server's and ignored.
OUR_ATTENTIONS = ("hopper", "pallas_gpu", "pallas_tpu", "xla", "reference")
_SERVER_PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client", "zmq", "msgspec")
needing_server = partial(needing, _SERVER_PACKAGES, "the server", "server")
MAX_DEFAULT_WORKERS = 4


@with_flags("server", ServerOptions, SERVER_FLAGS, panel=SERVER_PANEL, http_workers=None)
@with_flags("engine", EngineOptions, {**SERVE_ENGINE_FLAGS, **NODE_FLAGS}, panel=ENGINE_PANEL, **SERVE_DEFAULTS)
def serve(
    context: typer.Context,
    trust_remote_code: TrustRemoteCode = False,
    *,
    engine: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve scoring and reranking over HTTP. SGLang's launch lines work unchanged: its other flags are accepted too."""
    server = replace(
        server, served_model_names=engine.served_names, log_level=chosen_log_level(context, server.log_level)
    )
    server = replace(server, http_workers=num_http_workers(server.http_workers, engine.device, engine.nnodes))
    run_server = _enter_server(server)
    warn_without_effect(engine, trust_remote_code, without_effect(context))
    warn_without_key(server)
    engine = normalize_synonyms(engine)
    if server.allow_runtime_lora_updating and engine.max_loras is None:
        engine = replace(engine, max_loras=len(engine.lora) + 1)
    from prefixwise.launch.loading import follow_rank_0, load_frontend, resolved_config

    if engine.node_rank:
        with _ended_without_other_ranks(engine.nnodes):
            follow_rank_0(engine)
        return
    open_engine = partial(open_engine_to_serve, engine, _log_program)
    if server.http_workers:
        run_server = partial(run_server, open_frontend=lambda: load_frontend(engine)[1:])
    with _ended_without_other_ranks(engine.nnodes):
        run_server(server, open_engine, partial(resolved_config, engine), _report_source(server))


@contextmanager
def _ended_without_other_ranks(nnodes: int) -> Iterator[None]:
    """With several ranks a failure ends the process at once: at a regular exit jax waits minutes for the others."""
    try:
        yield
    except (PrefixwiseError, KeyboardInterrupt) as error:
        if nnodes == 1:
            raise
        print_error(str(error) or "interrupted")
        logging.shutdown()
        os._exit(FAILED)


def num_http_workers(given: int | None, device: str, nnodes: int = 1) -> int:
    """The option's number or, by default, none on a CPU and, on an accelerator, one for every fourth core, up to four.

    A GPU is busy with the work of a few cores. On a CPU the model needs them all. With HTTP workers an engine that
    fails is started again; over several hosts it cannot be, so there are none. Raises CommandError.
    """
    if nnodes > 1:
        if given:
            raise CommandError(f"--nnodes {nnodes} needs --http-workers 0, got {given}")
        return 0
    if given is not None:
        return given
    if device == "cpu" or (device == "auto" and not has_accelerator()):
        return 0
    return min(MAX_DEFAULT_WORKERS, max(1, num_cores() // 4))


def _enter_server(options: ServerOptions) -> Callable[..., None]:
    """Import the server late: it is heavy, and its packages may be missing. Sets up the server's log."""
    with needing_server():
        from prefixwise.server.logs import set_up_logging

        if options.http_workers:
            from prefixwise.server.workers.supervisor import run_workers
        else:
            from prefixwise.server.launch import run_server
    from prefixwise.server.tracing import check_tracing

    set_up_logging(options)
    check_tracing(options)
    return run_workers if options.http_workers else run_server


def _report_source(options: ServerOptions) -> ReportSource | None:
    """None if the packages of the report viewer are not installed."""
    folder = None if options.reports_dir is None else Path(options.reports_dir)
    if folder is not None and not folder.is_dir():
        raise CommandError(f"--reports-dir must be a folder, got {str(folder)!r}")
    missing = next((package for package in NEEDED_PACKAGES if find_spec(package) is None), None)
    if missing is not None:
        if folder is not None:
            log.warning("--reports-dir has no effect: %s is missing; %s", missing, install_command("harness"))
        return None
    return LateReports(folder)


def _log_program(done: int, total: int, title: str) -> None:
    """Log about ten lines for any number of programs."""
    if done and done % -(-total // 10) == 0:
        log.info("warm-up: %d of %d programs compiled; next: %s", done, total, title)


def chosen_log_level(context: typer.Context, own: LogLevel) -> LogLevel:
    """The verb's own log level, or that of `prefixwise --log-level debug serve` if only that is given."""
    program = context.find_root()
    if program is context or is_typed(context, "log_level"):
        return own
    level: LogLevel = program.params["log_level"]
    return level if is_typed(program, "log_level") else own


def warn_without_effect(engine: EngineOptions, trust_remote_code: bool, others: Sequence[Ignored]) -> None:
    """Log one line that names all flags that are accepted without effect. `others`: those that only SGLang has."""
    named = [each.text for each in others if not each.is_always_so]
    named += [f"{each.text} (always so here)" for each in others if each.is_always_so]
    if trust_remote_code:
        named.append("--trust-remote-code (no code from a checkpoint is ever run)")
    if engine.attention is not None and engine.attention not in OUR_ATTENTIONS:
        named.append(f"--attention-backend {engine.attention} (ours are {', '.join(OUR_ATTENTIONS)})")
    if engine.nnodes == 1 and engine.dist_init_addr is not None:
        named.append(f"--dist-init-addr {engine.dist_init_addr} (without --nnodes)")
    if named:
        log.warning("accepted without effect: %s", ", ".join(named))


def warn_without_key(server: ServerOptions) -> None:
    """Log a warning if other machines can use the server without a key."""
    if server.api_key is None and not is_loopback(server.host):
        log.warning(
            "--host %s without an API key: every machine that reaches port %d can use this server; "
            "set PREFIXWISE_API_KEY or --api-key",
            server.host,
            server.port,
        )


def normalize_synonyms(engine: EngineOptions) -> EngineOptions:
    """Replace other servers' names of dtypes and attention implementations by ours."""
    return replace(
        engine,
        dtype=DTYPE_SYNONYMS.get(engine.dtype, engine.dtype),
        attention=engine.attention if engine.attention in OUR_ATTENTIONS else None,
    )
