"""Runs the notebooks of this folder and writes their outputs into them: `make notebooks`."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh kernel. Raises CellExecutionError if a cell does."""
    notebook = nbformat.read(path, as_version=4)
    sockets = Config(KernelManager={"transport": "ipc"})  # files, which no other user can listen to
    return NotebookClient(notebook, timeout=300, record_timing=False, kernel_name="python3", config=sockets).execute()


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(executed(path), path)
