"""A throw-away Hugging Face cache, laid out as the hub's client lays it out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def add_to_cache(home: Path, model_id: str, source: Path, revision: str = "a" * 40, ref: str | None = "main") -> Path:
    """Put a folder, or one file, under `home` as if it had been downloaded; returns the snapshot."""
    repo = home / "hub" / f"models--{model_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / revision
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    if ref is not None:
        (repo / "refs" / ref).write_text(revision)
    for index, file in enumerate(sorted(source.iterdir()) if source.is_dir() else [source]):
        blob = repo / "blobs" / f"{revision}-{index}"
        blob.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, blob)
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def run_with_cache(home: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own: the hub's client reads its environment when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
