"""Renders a checkpoint's chat template in a process of its own.

A template is a program that comes with the checkpoint. jinja2's sandbox keeps it from everything except writing text,
but not from looping without end or from writing without end. So it runs in a child process, which this file is, too:
the kernel bounds the child's time and memory. The child imports jinja2 and nothing of ours, and starts in 0.1 s.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

MAX_CPU_SECONDS = 4
_MAX_MEMORY_BYTES = 1 << 30
_MAX_WALL_SECONDS = 120  # of a busy machine
_MAX_CHARACTERS = 1 << 20
_TODAY = date(2024, 7, 26)  # the date that Llama 3's template writes by default


class ChatTemplateError(Exception):
    """The template fails; the message is the reason."""


def render_chat_template(template: str, variables: Mapping[str, Any]) -> str:
    """The text that the template writes for these variables, which must be plain JSON. Raises ChatTemplateError.

    The template's date is fixed, since some templates write the date into the prompt, and scores must not change with
    the date.
    """
    command = [sys.executable, "-I", "-S", __file__, str(MAX_CPU_SECONDS), *_package_folders("jinja2", "markupsafe")]
    question = json.dumps({"template": template, "variables": dict(variables)}).encode()
    try:
        child = subprocess.run(
            command, input=question, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_MAX_WALL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChatTemplateError(f"its process cannot be run: {error}") from None
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        reason = f"its process failed with exit status {child.returncode}"
        if child.returncode < 0:  # a signal: the kernel ended it
            reason = f"it does not end within {MAX_CPU_SECONDS} s and {_MAX_MEMORY_BYTES >> 20} MiB"
        raise ChatTemplateError(reason) from None
    if "failure" in answer:
        raise ChatTemplateError(answer["failure"])
    text: str = answer["text"]
    return text


def _package_folders(*packages: str) -> list[str]:
    """Where to import them from, without importing them."""
    origins = [spec.origin for spec in map(find_spec, packages) if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(Path(origin).parents[1]) for origin in origins))


# The child


def _main(max_cpu_seconds: str, *package_folders: str) -> None:
    for limit, most in (
        (resource.RLIMIT_CPU, int(max_cpu_seconds)),
        (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # macOS does not have all of them; a lower one may be set
            resource.setrlimit(limit, (most, most))
    sys.path.extend(package_folders)
    question = json.loads(sys.stdin.buffer.read())
    try:
        text = compile_chat_template(question["template"]).render(question["variables"])
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"it writes {len(text)} characters, more than {_MAX_CHARACTERS}")
        answer = {"text": text}
    except Exception as error:  # a template may fail in any way
        answer = {"failure": str(error)[:1000] or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


def compile_chat_template(template: str) -> Template:
    """In jinja2's sandbox, in this process: nothing bounds its time and memory."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(template)


def _generation_tag() -> type[Extension]:
    """`{% generation %}`, which marks answers of the assistant in templates; it has no effect here."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012  # jinja2 expects it like this

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


if __name__ == "__main__":
    _main(*sys.argv[1:])
