"""lm-evaluation-harness on three tasks of BIG-bench: through our model class, our server and lm_eval's model `hf`.

    python -m benchmarks.quality.harness                       tables; the last line on stdout is JSON
    python -m benchmarks.quality.harness --limit 40            fewer documents of every task

All three read the embedded model in float32, zero-shot and five-shot: `shared`, where all documents have the same
examples (lm_eval's sampler `first_n`), and `own`, where each has its own (its default). A row has accuracies, the
largest difference of log-likelihoods, and documents per second of lm_eval's call `loglikelihood`: tokenizing, and the
model. `hf` has the batch size that is fastest on a task's first documents. `--pretrained`, `--device`, `--dtype` and
`--backend` compare another model on another device. Needs the packages of the extra `lm-eval`, and transformers.

The tasks have short documents, as `hf` computes a prompt again for every choice, which takes hours on two cores; and
choices of several tokens, as it computes those of one token together. `--task`, `--shots` and `--model` run a part,
perhaps beside others: `taskset -c 0,1`.

On a CPU `hf` takes its log-softmax in float64 (its argument `softmax_dtype`): in float32 it adds 49,152 numbers in few
lanes, which moved log-likelihoods by 5e-4 from those of a float64 model on an ARM CPU, where ours differ by 5e-5. What
that costs `hf` is in the JSON, as `hf_softmax_seconds`: those of the first documents, in float32 and float64.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu.__main__ import machine
from benchmarks.goals.__main__ import commit
from benchmarks.quality.data import HARNESS_TASKS, Document, Task, read_task
from prefixwise import __version__
from prefixwise.bench.files import now_utc
from prefixwise.models.sources import embedded_model_path
from tests.server.server_process import ServerProcess, server_process

NUM_EXAMPLES = 40  # documents at the end of a task, from which examples are taken
SHOTS = {"zero": ("first_n", 0), "shared": ("first_n", 5), "own": ("default", 5)}  # sampler, examples
GOALS = {"shared": 8.0, "own": 2.5}  # times the documents per second of `hf`
GPU_GOALS = {"shared": 10.0, "own": 3.0}
BATCH_SIZES = (1, 4, 16)
GPU_BATCH_SIZES = (16, 64, 256)
GPU_CACHE_BYTES = 4 << 30  # our KV cache on a GPU, on which `hf` needs room for logits of whole batches
PROBE_DOCUMENTS = 4  # five-shot, for each batch size; 128 on a GPU
MAX_DIFFERENCE = 1e-4  # of a log-likelihood, in nats

MODELS = ("prefixwise", "local-completions", "hf")


@dataclass(frozen=True)
class Run:
    """One task through one model."""

    accuracy: float
    logprobs: NDArray[np.float64]  # of every choice of every document
    num_documents: int
    seconds: float
    cpu_seconds: float  # of this process, which a busy machine does not change much; not those of a server

    @property
    def rate(self) -> float:
        return self.num_documents / self.seconds


class Harness:
    """lm_eval with tasks of a folder."""

    def __init__(self, folder: Path) -> None:
        from lm_eval.tasks import TaskManager

        self._tasks = TaskManager(include_path=str(folder), include_defaults=False)

    def run(self, model: Any, task: str, shots: str, limit: int | None) -> Run:
        from lm_eval import simple_evaluate

        name, call, spent = task_name(task, shots), model.loglikelihood, np.zeros(2)

        def timed(requests: Any, **options: Any) -> Any:
            begin = perf_counter(), process_time()
            answers = call(requests, **options)
            spent[:] += np.subtract((perf_counter(), process_time()), begin)
            return answers

        model.loglikelihood = timed
        try:
            found = simple_evaluate(
                model=model,
                tasks=[name],
                task_manager=self._tasks,
                num_fewshot=SHOTS[shots][1],
                limit=limit,
                bootstrap_iters=0,
            )
        finally:
            model.loglikelihood = call
        samples = sorted(found["samples"][name], key=lambda sample: int(sample["doc_id"]))
        logprobs = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
        return Run(found["results"][name]["acc,none"], np.array(logprobs), len(samples), *spent.tolist())


def task_name(task: str, shots: str) -> str:
    return f"bigbench_{task.rpartition('/')[2]}_{SHOTS[shots][0]}"


def write_task(task: Task, folder: Path) -> None:
    """A task for each sampler, in lm_eval's YAML (JSON is YAML), and its documents."""
    splits = {"test": task.documents[:-NUM_EXAMPLES], "train": task.documents[-NUM_EXAMPLES:]}
    files = {split: folder / f"{task.name.replace('/', '.')}.{split}.jsonl" for split in splits}
    for split, documents in splits.items():
        files[split].write_text("".join(map(_line, documents)), encoding="utf-8")
    for shots, (sampler, _) in SHOTS.items():
        settings = {
            "task": task_name(task.name, shots),
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {split: str(path) for split, path in files.items()}},
            "test_split": "test",
            "fewshot_split": "train",
            "fewshot_config": {"sampler": sampler},
            "output_type": "multiple_choice",
            "description": task.description,
            "doc_to_text": "text",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "target_delimiter": "",
            "fewshot_delimiter": task.separator,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        (folder / f"{settings['task']}.yaml").write_text(json.dumps(settings), encoding="utf-8")


def _line(document: Document) -> str:
    return json.dumps({"text": document.text, "choices": document.choices, "gold": document.gold}) + "\n"


@dataclass(frozen=True)
class Checkpoint:
    """What all models read."""

    pretrained: str | None  # None: the embedded model
    device: str
    dtype: str
    backend: str  # ours

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def probe_documents(self) -> int:
        return 128 if self.is_gpu else PROBE_DOCUMENTS

    def ours(self) -> Any:
        from prefixwise.lm_eval import PrefixwiseLM

        return PrefixwiseLM(
            self.pretrained,
            backend=self.backend,
            device=self.device,
            dtype=self.dtype,
            prefix_cache_bytes=GPU_CACHE_BYTES if self.is_gpu else None,
        )

    def server(self) -> AbstractContextManager[ServerProcess]:
        model = () if self.pretrained is None else (f"--model={self.pretrained}",)
        options = (f"--backend={self.backend}", f"--device={self.device}", f"--dtype={self.dtype}")
        return server_process(program=("prefixwise", "serve", *options, *model))

    @cached_property
    def loaded(self) -> dict[str, Any]:
        """Model and tokenizer of transformers, as arguments of `hf`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from tests.reference import Reference

        if self.pretrained is not None:
            model = AutoModelForCausalLM.from_pretrained(self.pretrained, dtype=self.dtype).to(self.device)
            return {"pretrained": model, "tokenizer": AutoTokenizer.from_pretrained(self.pretrained)}
        path = embedded_model_path()
        model = Reference.load(path.parent, gguf_file=path.name).model.to(device=self.device, dtype=self.torch_dtype)
        return {"pretrained": model, "tokenizer": AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)}

    @property
    def torch_dtype(self) -> Any:
        import torch

        return getattr(torch, self.dtype)

    @property
    def softmax_dtype(self) -> str | None:
        """Of `hf`; None: its default, that of the logits."""
        return None if self.is_gpu else "float64"

    def hf(self, batch_size: int, softmax_dtype: str | None = None) -> Any:
        from lm_eval.models.huggingface import HFLM

        return HFLM(**self.loaded, batch_size=batch_size, softmax_dtype=softmax_dtype)


def our_server(url: str) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=model["id"], tokenizer_backend="remote", batch_size=64
    )


def best_batch_size(harness: Harness, task: str, checkpoint: Checkpoint) -> int:
    """Of `hf`, for this task, with its default softmax."""
    from torch import OutOfMemoryError

    sizes = GPU_BATCH_SIZES if checkpoint.is_gpu else BATCH_SIZES
    rates = {}
    for size in sizes:
        try:
            rates[size] = harness.run(checkpoint.hf(size), task, "shared", checkpoint.probe_documents).rate
        except OutOfMemoryError:
            break  # so do larger ones
    print("hf, documents/s by batch size:", {size: round(rate, 3) for size, rate in rates.items()}, file=sys.stderr)
    return max(rates, key=lambda size: rates[size])


def row(task: str, shots: str, runs: dict[str, Run]) -> dict[str, Any]:
    """What is reported of a task. `runs`: by model. Log-likelihoods are compared with those of the last one."""
    *others, last = runs
    reference = runs[last]
    differences = {name: float(np.abs(runs[name].logprobs - reference.logprobs).max()) for name in others}
    return {
        "task": task,
        "shots": shots,
        "documents": reference.num_documents,
        "choices": len(reference.logprobs),
        "accuracy": {name: run.accuracy for name, run in runs.items()},
        "max_difference": differences,
        "compared_with": last,
        "documents_per_second": {name: run.rate for name, run in runs.items()},
        "ratio": {name: runs[name].rate / reference.rate for name in others if last == "hf"},
        "cpu_seconds": {name: run.cpu_seconds for name, run in runs.items() if name != "local-completions"},
    }


def failures(rows: Sequence[dict[str, Any]], is_exact: bool = True, goals: Mapping[str, float] = GOALS) -> list[str]:
    """What is not as it must be: other accuracies and log-likelihoods in float32 (`is_exact`), or too slow."""
    found = []
    for each in rows:
        title = f"{each['task']}, {each['shots']}"
        if is_exact and len(set(each["accuracy"].values())) > 1:
            found.append(f"{title}: accuracies differ: {each['accuracy']}")
        if is_exact and max(each["max_difference"].values()) > MAX_DIFFERENCE:
            found.append(f"{title}: log-likelihoods differ by {each['max_difference']}")
        if each["ratio"].get("prefixwise", np.inf) < goals.get(each["shots"], 0):
            found.append(f"{title}: {each['ratio']['prefixwise']:.1f} x hf, goal {goals[each['shots']]}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| task | examples | documents | accuracy | difference | class | server | `hf` | class / `hf` |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for each in rows:
        found = each["documents_per_second"]
        rates = " | ".join(f"{found[name]:.2f}" if name in found else "" for name in MODELS)
        ratio = f"{each['ratio']['prefixwise']:.1f}" if each["ratio"] else ""
        lines.append(
            f"| {each['task']} | {each['shots']} | {each['documents']} | {each['accuracy']['prefixwise']:.3f} | "
            f"{max(each['max_difference'].values()):.1e} | {rates} | {ratio} |"
        )
    return "\n".join(lines)


def measure(
    checkpoint: Checkpoint,
    limit: int | None,
    tasks: Sequence[str],
    shots: Sequence[str],
    names: Sequence[str],
    batch_size: int | None,
) -> dict[str, Any]:
    rows, batch_sizes, softmax_seconds = [], {}, {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/datasets"
        for task in tasks:
            write_task(read_task(task), Path(folder))
        harness = Harness(Path(folder))
        models = {"prefixwise": checkpoint.ours()}
        if "local-completions" in names:
            models["local-completions"] = our_server(stack.enter_context(checkpoint.server()).url)
        if checkpoint.is_gpu:  # kernels are compiled, and graphs captured, on first use
            theirs = [checkpoint.hf(GPU_BATCH_SIZES[0])] if "hf" in names else []
            for model in (*models.values(), *theirs):
                harness.run(model, tasks[0], "own", checkpoint.probe_documents)
        for task in tasks:
            if "hf" in names:
                size = batch_sizes[task] = batch_size or best_batch_size(harness, task, checkpoint)
                tried = {dtype: checkpoint.hf(size, dtype) for dtype in (None, checkpoint.softmax_dtype)}
                softmax_seconds[task] = {
                    str(dtype or "default"): harness.run(each, task, "shared", checkpoint.probe_documents).seconds
                    for dtype, each in tried.items()
                }
                models["hf"] = tried[checkpoint.softmax_dtype]
            for each in shots:
                runs = {name: harness.run(model, task, each, limit) for name, model in models.items()}
                rows.append(row(task, each, runs))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    is_exact, goals = checkpoint.dtype == "float32", GPU_GOALS if checkpoint.is_gpu else GOALS
    return {
        "device": models["prefixwise"].engine.backend.info.device_kind,
        "hf_batch_sizes": batch_sizes,
        "hf_softmax_seconds": softmax_seconds,
        "rows": rows,
        "failures": failures(rows, is_exact, goals),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="documents of every task; default: all")
    parser.add_argument("--task", action="append", choices=HARNESS_TASKS, help="default: all")
    parser.add_argument("--shots", action="append", choices=SHOTS, help="default: all")
    parser.add_argument("--batch-size", type=int, help="of hf; default: the fastest on a task's first documents")
    parser.add_argument("--pretrained", help="a folder; default: the embedded model")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--model", action="append", choices=MODELS[1:], help="beside ours; default: both")
    parser.add_argument("--backend", default="auto", help="of prefixwise; default: auto")
    given = parser.parse_args()
    checkpoint = Checkpoint(given.pretrained, given.device, given.dtype, given.backend)
    names = given.model or MODELS
    tasks, shots = given.task or HARNESS_TASKS, given.shots or tuple(SHOTS)
    found = measure(checkpoint, given.limit, tasks, shots, names, given.batch_size)
    print(table(found["rows"]))
    command = f"python -m benchmarks.quality.harness {' '.join(sys.argv[1:])}".strip()
    facts = {"command": command, "time": now_utc(), "version": __version__, "commit": commit(), "machine": machine()}
    print(json.dumps({**facts, **found}))
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
