"""Makes docs/example-report and the sample of `/reports` from a run of `prefixwise validate self`.

    PYTHONPATH=. python docs/write_example_report.py SELF_DIR

The report is copied, with a picture of its top by the system's Chromium. The sample has the files that the report of
the comparison reads, without white space.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefixwise.bench.files import read_artifact, sha256_of
from prefixwise.bench.kinds.self_check import SelfCheck
from prefixwise.bench.run.report import SAMPLE_FOLDER
from tests.web.browser import new_tab, open_browser

REPORT_FOLDER = Path(__file__).parent / "example-report"
MATRICES = [f"{backend}_{view}" for view in ("portable", "best_native") for backend in ("jax", "pytorch")]


def main(run_folder: Path) -> None:
    """Exits where the run is not a whole one."""
    check = read_artifact(run_folder / "self_check.json", SelfCheck)
    if not (check.complete and check.all_pass):
        sys.exit(f"expected a run whose steps are all done, got {run_folder / 'self_check.json'}")
    write_report(run_folder, REPORT_FOLDER)
    write_sample(run_folder, SAMPLE_FOLDER)


def write_report(run_folder: Path, folder: Path) -> None:
    """Both files, and `screenshot.png`."""
    for name in ("report.md", "report.html"):
        shutil.copyfile(run_folder / name, folder / name)
    with open_browser() as browser:
        page = new_tab(browser, (1000, 1250))
        page.goto((folder / "report.html").resolve().as_uri())
        page.screenshot(path=folder / "screenshot.png")


def write_sample(run_folder: Path, folder: Path) -> None:
    """Replaces the files of the folder. The comparison is made again, since it has the checksums of the matrices."""
    for path in folder.glob("*.json"):
        path.unlink()
    write_compact(folder / "self_check.json", json.loads((run_folder / "self_check.json").read_text(encoding="utf-8")))
    workload = folder / "workload.json"
    write_compact(workload, json.loads((run_folder / workload.name).read_text(encoding="utf-8")))
    flags = []
    for name in MATRICES:
        matrix = json.loads((run_folder / f"{name}_matrix.json").read_text(encoding="utf-8"))
        matrix["workload_ref"] |= {"path": workload.name, "sha256": sha256_of(workload)}
        write_compact(folder / f"{name}_matrix.json", matrix)
        flags += [f"--{name.replace('_', '-')}-json", f"{name}_matrix.json"]
    command = [sys.executable, "-m", "prefixwise", "bench", "compare", *flags, "--output-json", "comparison.json"]
    subprocess.run(command, cwd=folder, check=True)
    comparison = folder / "comparison.json"
    write_compact(comparison, json.loads(comparison.read_text(encoding="utf-8")))


def write_compact(path: Path, document: Any) -> None:
    """JSON on one line."""
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
