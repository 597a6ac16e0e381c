"""`prefixwise serve`: the HTTP server. `python -m prefixwise.launch_server` is the same program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import typer

from prefixwise.cli.failures import CommandError
from prefixwise.cli.flags import with_flags
from prefixwise.cli.late_reports import NEEDED_PACKAGES, LateReports
from prefixwise.cli.serve_options import (
    DTYPE_SYNONYMS,
    ENGINE_PANEL,
    SERVE_ENGINE_FLAGS,
    SERVER_FLAGS,
    SERVER_PANEL,
    TrustRemoteCode,
)
from prefixwise.host import install_command
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import LogLevel, ServerOptions
from prefixwise.server.reports import ReportSource

log = logging.getLogger("prefixwise")

# The names that `--attention-backend` passes on; any other is a peer's.
OUR_ATTENTIONS = ("hopper", "pallas_gpu", "pallas_tpu", "xla", "reference")
_SERVER_PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client")


@with_flags("server", ServerOptions, SERVER_FLAGS, panel=SERVER_PANEL)
@with_flags("engine", EngineOptions, SERVE_ENGINE_FLAGS, panel=ENGINE_PANEL, warmup="full")
def serve(
    context: typer.Context,
    trust_remote_code: TrustRemoteCode = False,
    *,
    engine: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve scoring and reranking over HTTP. The flags of SGLang's multi-item scoring servers work unchanged."""
    server = replace(
        server, served_model_names=engine.served_names, log_level=chosen_log_level(context, server.log_level)
    )
    run_server = _enter_server(server)
    tell_without_effect(engine, trust_remote_code)
    engine = settle_synonyms(engine)
    from prefixwise.launch.loading import load_engine, resolved_config

    open_engine = partial(load_engine, engine, _log_program)
    run_server(server, open_engine, partial(resolved_config, engine), _report_source(server))


def _enter_server(options: ServerOptions) -> Callable[..., None]:
    """Imported late: it is heavy, and what it stands on may be missing. From here on the log is the server's."""
    try:
        from prefixwise.server.launch import run_server
        from prefixwise.server.logs import set_up_logging
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _SERVER_PACKAGES:
            raise
        hint = f"install what the server needs with: {install_command('server')}"
        raise CommandError(f"{package} is not installed", hint=hint) from None
    set_up_logging(options)
    return run_server


def _report_source(options: ServerOptions) -> ReportSource | None:
    """None where what the report viewer stands on is not installed."""
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
    """About ten lines, however many programs there are."""
    if done and done % -(-total // 10) == 0:
        log.info("warm-up: %d of %d programs compiled; next: %s", done, total, title)


def chosen_log_level(context: typer.Context, own: LogLevel) -> LogLevel:
    """`prefixwise --log-level debug serve` counts too, where the verb's own option is not given."""
    program = context.find_root()
    if program is context or _is_given(context.get_parameter_source("log_level")):
        return own
    level: LogLevel = program.params["log_level"]
    return level if _is_given(program.get_parameter_source("log_level")) else own


def _is_given(source: Enum | None) -> bool:
    return source is not None and source.name == "COMMANDLINE"


def tell_without_effect(engine: EngineOptions, trust_remote_code: bool) -> None:
    """One line for each flag that is accepted and changes nothing here."""
    if trust_remote_code:
        log.warning("--trust-remote-code has no effect: no code from a checkpoint is ever run")
    if engine.attention is not None and engine.attention not in OUR_ATTENTIONS:
        ours = ", ".join(OUR_ATTENTIONS)
        log.warning(
            "--attention-backend %s has no effect: prefixwise chooses its own attention (%s)", engine.attention, ours
        )


def settle_synonyms(engine: EngineOptions) -> EngineOptions:
    """In our own words, what other servers call otherwise."""
    return replace(
        engine,
        dtype=DTYPE_SYNONYMS.get(engine.dtype, engine.dtype),
        attention=engine.attention if engine.attention in OUR_ATTENTIONS else None,
    )
