from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import prefixwise
from prefixwise.host import NO_THREAD
from tests.checkpoints import make_gguf
from tests.cli.conftest import (
    FAKE_PROGRAM,
    REAL_PROGRAM,
    RunMain,
    plain_environment,
    run_on_terminal,
    run_process,
)

SCRIPT = str(Path(sys.executable).with_name("prefixwise"))
LOADED_MESSAGE = "INFO prefixwise: fake model loaded"
SCORE = ("score", "--query", "Is this a fox? ", "--label", "y", "--label", "z")

# Every line of standard input is a command, and has a process of its own that has imported the program alone.
HEAVY_MODULES_AFTER = """
import os, sys
from prefixwise.cli.main import main
for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.exit()
try:
    main(line.rstrip("\\n").split("\\t"))
except SystemExit as exited:
    assert exited.code == 0
heavy = ("torch", "jax", "tokenizers", "huggingface_hub", "gguf", "starlette", "uvicorn", "transformers")
ours = ("prefixwise.cli.bench_verbs", "prefixwise.cli.ops.verbs", "prefixwise.bench.remote")
others = ("httpx", "ray", "pyarrow", *ours)
print([name for name in (*heavy, *others) if name in sys.modules], file=sys.stderr)
"""


ONLY_THE_ENTRY = """
import sys, prefixwise.__main__
assert "typing" not in sys.modules  # which takes longer than all the rest
print(*sorted(name for name in sys.modules if name.startswith("prefixwise")))
"""


def modules_after(*commands: tuple[str, ...], **environment: str) -> list[str]:
    """What of the heavy modules each of them has imported, in words."""
    lines = "".join("\t".join(each) + "\n" for each in commands)
    ran = run_process([sys.executable, "-c", HEAVY_MODULES_AFTER], stdin=lines.encode(), **environment)
    assert ran.status == 0, ran.err
    return ran.err.splitlines()


def test_help_and_version_import_nothing_heavy() -> None:
    of_verbs = [(verb, "--help") for verb in ("score", "rerank", "batch", "serve", "aot")]
    commands = [("--help",), ("--version",), *of_verbs, ("profiles",)]
    assert dict(zip(commands, modules_after(*commands), strict=True)) == dict.fromkeys(commands, "[]")


def test_scoring_imports_what_it_needs_and_no_more(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Of two frameworks one, on a CPU without asking the other; nothing of the server, the harness or the hub.
    (pydantic is there: typer reads values with it.)"""
    model = make_gguf(checkpoint_of("llama"), tmp_path / "model.gguf")
    command = (*SCORE, "--item", "x", "--device", "auto", "--quiet", "--model", str(model))
    assert modules_after(command, JAX_PLATFORMS="cpu") == ["['torch', 'tokenizers', 'gguf']"]


@pytest.mark.parametrize("group", ["bench", "validate", "aot", "ops", "cluster"])
def test_a_group_is_found_and_explained_when_it_is_called(run_main: RunMain, group: str) -> None:
    ran = run_main(group, "--help")
    assert ran.status == 0
    purpose = next(line for line in run_main("--help").out.splitlines() if line.startswith(f"  {group} "))
    first_words = " ".join(purpose.split()[1:4])
    assert first_words in " ".join(ran.out.split())
    assert run_main(group, "nothing").status == 2


@pytest.mark.parametrize("group", ["bench", "validate", "ops", "cluster"])
def test_a_group_without_a_verb_says_what_is_missing(run_main: RunMain, group: str) -> None:
    ran = run_main(group)
    assert (ran.status, ran.out.rstrip()) == (2, run_main(group, "--help").out.rstrip())
    assert ran.err.startswith(
        f"error: expected one of these commands, got none\nhint: prefixwise {group} --help lists the commands\n"
    )


@pytest.mark.parametrize("program", [(SCRIPT,), REAL_PROGRAM])
def test_the_script_and_the_module_are_the_same_program(program: tuple[str, ...]) -> None:
    ran = run_process([*program, "--version"])
    assert (ran.status, ran.out, ran.err) == (0, f"prefixwise {prefixwise.__version__}\n", "")


def test_without_a_verb_it_prints_its_help(run_main: RunMain) -> None:
    ran = run_main()
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == run_main("--help").out
    assert all(verb in ran.out for verb in ("score", "rerank", "serve", "models", "profiles"))


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (
            ("scor",),
            "error: No such command 'scor'. Did you mean 'score'?",
            "hint: prefixwise --help lists the commands",
        ),
        (("bench", "x"), "error: No such command 'x'.", "hint: prefixwise bench --help lists the commands"),
        (("score", "--itm", "x"), "error: No such option: --itm", "hint: prefixwise score --help lists the options"),
        (("score", "--top", "0"), "error: Invalid value for '--top'", "hint: prefixwise score --help"),
        (("score", "--dtype", "x"), "error: Invalid value for '--dtype'", "hint: prefixwise score --help"),
        (("score", "--profile", "x"), "error: No such option: --profile", "hint: prefixwise score --help"),
        (("rerank", "--top", "0"), "error: Invalid value for '--top'", "hint: prefixwise rerank --help"),
        (("score", "--mask", "x"), "error: Invalid value for '--mask'", "hint: prefixwise score --help"),
        (("--log-level", "loud", "score"), "error: Invalid value for '--log-level'", "hint: prefixwise --help"),
    ],
)
def test_a_usage_error_is_two_lines_and_status_2(
    run_main: RunMain, args: tuple[str, ...], error: str, hint: str
) -> None:
    ran = run_main(*args)
    first, second = ran.err.splitlines()
    assert (ran.status, ran.out) == (2, "")
    assert first.startswith(error)
    assert second.startswith(hint)


def test_a_failure_is_two_lines_on_stderr_and_status_1() -> None:
    ran = run_process([*REAL_PROGRAM, *SCORE, "--item", "x", "--model", "no such model"])
    first, second = ran.err.splitlines()
    assert (ran.status, ran.out) == (1, "")
    assert first.startswith("error: no model at 'no such model': expected a folder")
    assert second.startswith("hint: `prefixwise models` lists")


def test_a_failure_stays_on_one_line_however_long(run_main: RunMain) -> None:
    ran = run_main(*SCORE, "--item", "x", "--label", "one\ntwo three four five six seven eight nine ten")
    first, second = ran.err.splitlines()
    assert first.startswith("error: labels[2] must be exactly one token")
    assert len(first) > 80
    assert second.startswith("hint: ")


def test_a_machine_without_room_for_threads_is_one_line(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")  # as Python says it

    monkeypatch.setattr(threading.Thread, "start", start)
    ran = run_main("serve", "--port", "0")
    assert (ran.status, ran.err.splitlines()) == (1, [f"error: {NO_THREAD}"])


def test_color_is_for_terminals_and_no_color_turns_it_off() -> None:
    failing = [*REAL_PROGRAM, "score"]
    red = "\x1b[31m"
    assert red in run_on_terminal(failing).err
    assert "\x1b[" not in run_on_terminal(failing, NO_COLOR="1").err
    assert "\x1b[" not in run_process(failing).err


def test_log_level_lets_the_engine_speak_on_stderr() -> None:
    command = [*SCORE, "--item", "a fox", "--quiet"]
    assert run_process([*FAKE_PROGRAM, "--log-level", "info", *command]).err == f"{LOADED_MESSAGE}\n"
    assert run_process([*FAKE_PROGRAM, *command]).err == ""


def test_ctrl_c_exits_130_without_a_trace(tmp_path: Path) -> None:
    fifo = tmp_path / "items"
    os.mkfifo(fifo)
    command = [*REAL_PROGRAM, *SCORE, "--items-file", str(fifo)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=plain_environment())
    with fifo.open("wb"):  # opens as soon as the program has opened it too, and is waiting for items
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_ctrl_c_during_the_imports_exits_130_without_a_trace(tmp_path: Path) -> None:
    """The first package that the program imports, typer, is one that waits."""
    fifo = tmp_path / "importing"
    os.mkfifo(fifo)
    (tmp_path / "typer.py").write_text(f"open({str(fifo)!r}).read()\n")
    environment = plain_environment(PYTHONPATH=str(tmp_path))
    process = subprocess.Popen(
        [*REAL_PROGRAM, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    with fifo.open("wb"):  # opens as soon as the import has begun
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_nothing_but_the_interpreter_s_own_start_comes_before_an_interrupt_is_handled() -> None:
    ran = run_process(
        [sys.executable, "-S", "-c", ONLY_THE_ENTRY], PYTHONPATH=str(Path(prefixwise.__file__).parents[1])
    )
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.split() == ["prefixwise", "prefixwise.__main__", "prefixwise._version"]


@pytest.mark.parametrize("spelling", [("--top-n", "1"), ("--top-n=1",)])
def test_a_former_spelling_works_with_a_note(run_main: RunMain, spelling: tuple[str, ...]) -> None:
    command = ("rerank", "-q", "fox?", "-d", "a", "-d", "b", "--quiet")
    old, new = run_main(*command, *spelling), run_main(*command, "--top", "1")
    assert (old.status, old.out) == (0, new.out)
    assert old.err == f"note: --top-n is deprecated; use --top\n{new.err}"
    assert run_main("score", "-q", "--top-n", "-i", "x", "-l", "y", "--quiet").err == ""  # a text, no option
    assert run_main("profiles", "--top-n", "1").err.startswith("error: No such option: --top-n")


def test_the_line_for_programs_is_written_where_one_reads_or_asks(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = run_main("bench", "schema")
    assert "score-matrix" in json.loads(piped.out)["schemas"]
    monkeypatch.setattr("prefixwise.cli.bench_common.is_read_by_program", lambda: False)
    shown = run_main("bench", "schema")
    assert (shown.status, shown.out, shown.err) == (0, "", piped.err)
    assert run_main("bench", "schema", "--json") == piped
    assert run_main("bench", "schema") == shown
    assert json.loads(run_main("bench", "schema", "score-matrix").out)["type"] == "object"


def test_a_reader_that_stops_is_no_error() -> None:
    items = "".join(f"a fox of number {index}\n" for index in range(5_000)).encode()
    command = [*FAKE_PROGRAM, *SCORE, "--items-file", "-"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=plain_environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        process.stdin.write(items)
        process.stdin.close()
        assert process.stdout.readline().startswith(b"rank")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141
