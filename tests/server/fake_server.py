"""A real server process on the fake backend: `python -m tests.server.fake_server --port 0 --delay 0.05`.

Its scores can be computed by hand (`fake_scores`), and a forward takes as long as it is told to, in seconds
or until a file is there.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import ModelLoadError, PrefixwiseError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.batch import ForwardBatch, RunningForward
from prefixwise.prompts.profile_choice import profile_of_any_model
from prefixwise.prompts.tokenizer import TextTokenizer
from prefixwise.server import launch, usage
from prefixwise.server.config import DEFAULT_MAX_REQUEST_BYTES, ServerOptions
from prefixwise.server.launch import ENGINE_SECONDS, run_server
from prefixwise.server.workers import children, supervisor, worker_process
from prefixwise.server.workers.supervisor import run_workers
from tests.faults import FaultyBackend, Kind
from tests.prompts.merging_tokenizer import CHAT_TEMPLATE, merging_tokenizer
from tests.server.letters_profile import letters_choice

MODEL = "fake-model"
EMBEDDED_VOCABULARY, EMBEDDED_CONTEXT = 49_152, 8192


def wait_for(path: Path | None) -> None:
    """Until the file is there: how a test says when."""
    while path is not None and not path.exists():
        time.sleep(0.005)


class HeldBackend(FakeBackend):
    """No forward ends before the file is there."""

    def __init__(self, until: Path | None, **options: Any) -> None:
        super().__init__(**options)
        self._until = until

    def start(self, batch: ForwardBatch) -> RunningForward:
        running = super().start(batch)
        self.forwards.clear()  # they would count as memory that a client can take

        def wait() -> Any:
            wait_for(self._until)
            return running.wait()

        return replace(running, wait=wait)


def open_engine(args: argparse.Namespace) -> ScoringEngine:
    time.sleep(args.load_seconds)
    wait_for(args.load_until)
    if args.fail or (args.weights is not None and not args.weights.exists()):
        raise ModelLoadError(args.fail or "the weights are gone")
    if args.no_threads:
        raise RuntimeError("can't start new thread")  # as Python says it
    config, tokenizer = open_frontend(args)
    backend = HeldBackend(
        args.hold_until,
        vocab_size=EMBEDDED_VOCABULARY if args.embedded_tokenizer else 512,
        max_context_len=EMBEDDED_CONTEXT if args.embedded_tokenizer else 1 << 20,
        num_kv_blocks=1 << 14,
        step_tokens=args.step_tokens,
        seconds_per_forward=args.delay,
    )
    backend.config = replace(backend.config, num_classes=args.num_classes)
    faults = FaultyBackend(backend)
    if args.fault is not None:
        faults.inject(args.fault, times=None)
    scheduler = Scheduler(
        faults, SchedulerOptions(max_queued_tokens=args.max_queued_tokens, watchdog_timeout=args.watchdog_timeout)
    )
    return ScoringEngine(config, scheduler, tokenizer)


def open_frontend(args: argparse.Namespace) -> tuple[EngineConfig, TextTokenizer | None]:
    tokenizer = merging_tokenizer(chat_template=CHAT_TEMPLATE) if args.tokenizer else None
    profiles = letters_choice()
    if args.embedded_tokenizer:
        from prefixwise.launch.loading import read_tokenizer
        from prefixwise.models.sources import open_checkpoint

        tokenizer = read_tokenizer(open_checkpoint(None))
        profiles = profile_of_any_model(MODEL, tokenizer)
    return EngineConfig(MODEL, profiles=profiles), tokenizer


def open_frontend_of_worker(args: argparse.Namespace) -> tuple[EngineConfig, TextTokenizer | None]:
    if args.open_until is not None:
        try:
            args.open_until.with_suffix(".first").touch(exist_ok=False)
        except FileExistsError:
            args.open_until.with_suffix(f".{os.getpid()}").touch()  # it waits from now on
            wait_for(args.open_until)
    return open_frontend(args)


def limit_forks(number: int) -> None:
    """The machine has no room for more processes."""
    fork, left = os.fork, list(range(number))

    def fork_if_there_is_room() -> int:
        if not left:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left.pop()
        return fork()

    os.fork = fork_if_there_is_room


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a forward takes")
    parser.add_argument("--hold-until", type=Path, help="a file: no forward ends before it is there")
    parser.add_argument("--fault", choices=get_args(Kind), help="what every forward does")
    parser.add_argument("--watchdog-timeout", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--load-until", type=Path, help="a file: the model is not loaded before it is there")
    parser.add_argument("--open-until", type=Path, help="a file: no HTTP worker but the first opens before it is there")
    parser.add_argument("--open-seconds", type=float, default=worker_process.OPEN_SECONDS, help="for a worker to open")
    parser.add_argument(
        "--opening-seconds", type=float, default=children.OPENING_SECONDS, help="of a worker that hangs"
    )
    parser.add_argument("--silent-seconds", type=float, default=usage.SILENT_SECONDS, help="of a frozen process")
    parser.add_argument("--fail", default="", help="what goes wrong when the model is loaded")
    parser.add_argument("--no-threads", action="store_true", help="there is no room for the engine's threads")
    parser.add_argument("--weights", type=Path, help="a file: the model cannot be loaded if it is not there")
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--max-queued-tokens", type=int, default=None)
    parser.add_argument("--shutdown-grace", type=float, default=30.0)
    parser.add_argument(
        "--engine-seconds", type=float, default=ENGINE_SECONDS, help="for a device that is busy at the end"
    )
    parser.add_argument(
        "--exit-seconds", type=float, default=supervisor._EXIT_SECONDS, help="beyond the grace period, with workers"
    )
    parser.add_argument(
        "--keep-seconds", type=float, default=supervisor._KEEP_SECONDS, help="between two looks at the socket folder"
    )
    parser.add_argument("--max-request-bytes", type=int, default=DEFAULT_MAX_REQUEST_BYTES)
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--options", type=json.loads, default={}, help="more fields of ServerOptions, as JSON")
    parser.add_argument("--files", type=int, help="the limit of open files")
    parser.add_argument("--nohup", action="store_true", help="as under nohup")
    parser.add_argument("--tokenizer", action="store_true", help="take text, too")
    parser.add_argument("--embedded-tokenizer", action="store_true", help="take text as the embedded model does")
    parser.add_argument("--memory-limit", type=int, help="bytes of memory that the process may have")
    parser.add_argument("--num-classes", type=int, default=0, help="of a classifier; 0: the model is none")
    parser.add_argument("--forks", type=int, help="most processes that it can start")
    parser.add_argument("--log-json", action="store_true")
    parser.add_argument("--http-workers", type=int, default=0, help="processes for HTTP; 0: one process for all")
    args = parser.parse_args()
    options = ServerOptions(
        port=args.port,
        shutdown_grace=args.shutdown_grace,
        max_request_bytes=args.max_request_bytes,
        api_key=args.api_key,
        log_json=args.log_json,
        http_workers=args.http_workers,
        **args.options,
    )
    if args.files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.files, args.files))
    if args.memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (args.memory_limit, args.memory_limit))
    if args.forks is not None:
        limit_forks(args.forks)
    launch.ENGINE_SECONDS, usage.SILENT_SECONDS = args.engine_seconds, args.silent_seconds
    vars(supervisor).update(
        ENGINE_SECONDS=args.engine_seconds, _EXIT_SECONDS=args.exit_seconds, _KEEP_SECONDS=args.keep_seconds
    )
    worker_process.OPEN_SECONDS, children.OPENING_SECONDS = args.open_seconds, args.opening_seconds
    # Whoever runs the tests may have been started under nohup, too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if args.nohup else signal.SIG_DFL)
    try:
        serve = (
            run_server
            if not args.http_workers
            else partial(run_workers, open_frontend=partial(open_frontend_of_worker, args))
        )
        serve(options, lambda: open_engine(args), lambda engine: {"model": engine.config.model_name})
    except PrefixwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
