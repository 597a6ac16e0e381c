"""Type checkers find the package where it is installed, as a wheel and as an editable install.

`mypy` checks `typing_example.py` in `make check`, from the source; here a user's project does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "tests" / "typing_example.py"
PYRIGHT = ROOT / ".venv" / "npm" / "node_modules" / "pyright" / "index.js"
MISTAKE = (
    "\n\ndef mistake(scorer: Scorer) -> int:\n    return scorer.score('a', ['b'], labels=[' c']).ranked()[0].item\n"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A wheel: `build_wheel` or `build_editable` of the backend, in a copy of the project."""
    project = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    (project / "prefixwise").symlink_to(ROOT / "prefixwise")

    def build(hook: str) -> Path:
        folder = tmp_path_factory.mktemp(hook)
        code = f"from setuptools import build_meta; build_meta.{hook}({str(folder)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=project, check=True, capture_output=True)
        (wheel,) = folder.iterdir()
        return wheel

    return build


def test_an_editable_install_is_a_path_that_every_tool_can_read(built: Callable[[str], Path]) -> None:
    """setuptools' other way, a hook in the import system, is nothing that a type checker runs."""
    with zipfile.ZipFile(built("build_editable")) as wheel:
        (path,) = (wheel.read(name).decode().strip() for name in wheel.namelist() if name.endswith(".pth"))
        assert not [name for name in wheel.namelist() if name.endswith(".py")]
    assert (Path(path) / "prefixwise" / "py.typed").is_file()


@pytest.fixture(scope="module", params=["build_wheel", "build_editable"])
def user_python(
    request: pytest.FixtureRequest, built: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The Python of a user's environment, which has the package and what it needs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built(request.param)) as wheel:
        wheel.extractall(packages)
    needed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "zz_needed.pth").write_text("\n".join(needed), encoding="utf-8")
    return folder / "bin" / "python"


def check(command: list[str], python: Path, folder: Path, script: str) -> tuple[int, str]:
    (folder / "script.py").write_text(script, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run([*command, "script.py"], cwd=folder, capture_output=True, text=True, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_script_type_checks(checker: str, user_python: Path, tmp_path: Path) -> None:
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={user_python}", "--cache-dir=cache"]
    else:
        if not PYRIGHT.exists() or shutil.which("node") is None:
            pytest.skip("pyright is not installed: `make test` gets it with npm")
        (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}', encoding="utf-8")
        command = ["node", str(PYRIGHT), f"--pythonpath={user_python}"]
    script = EXAMPLE.read_text(encoding="utf-8")
    status, output = check(command, user_python, tmp_path, script)
    assert status == 0, output
    status, output = check(command, user_python, tmp_path, script + MISTAKE)  # it is not Any that is checked
    assert status == 1, output
    assert '"str"' in output
