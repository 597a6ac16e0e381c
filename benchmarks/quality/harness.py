"""lm-evaluation-harness on three tasks of BIG-bench: through our model class, our server and lm_eval's model `hf`.

    python -m benchmarks.quality.harness                       tables; the last line on stdout is JSON
    python -m benchmarks.quality.harness --limit 40            fewer documents of every task

All three read the embedded model in float32, zero-shot and five-shot: `shared`, where all documents have the same
examples (lm_eval's sampler `first_n`), and `own`, where each has its own (its default). A row has accuracies, the
largest difference of log-likelihoods, and documents per second of lm_eval's call `loglikelihood`: tokenizing, and the
model. `hf` has the batch size that is fastest on a task's first documents. `--pretrained`, `--device`, `--dtype` and
`--backend` compare another model on another device. Needs the packages of the extra `lm-eval`, and transformers.

The tasks have short documents, as `hf` computes a prompt again for every choice, which takes hours on two cores; and
choices of several tokens, as it computes those of one token together. `--task`, `--shots`, `--model`, `--first` and
`--limit` run a part, perhaps beside others: `taskset -c 0,1`. With `--parts FOLDER` runs are made of parts of 50
documents, which stay in the folder: a command that was stopped goes on where it was, and a last one without those
options reports all of them, on the same machine and with the same model.

On a CPU `hf` takes its log-softmax in float64 (its argument `softmax_dtype`): in float32 it adds 49,152 numbers in few
lanes, which moved log-likelihoods by 5e-4 from those of a float64 model on an ARM CPU, where ours differ by 5e-5. What
that costs `hf` is in the JSON, as `hf_softmax_seconds`: those of the first documents, in float32 and float64.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import httpx
import numpy as np

from benchmarks.cpu.__main__ import machine
from benchmarks.goals.__main__ import commit
from benchmarks.quality.data import HARNESS_TASKS, Document, Task, read_task
from benchmarks.quality.runs import GOALS, GPU_GOALS, MODELS, Parts, Run, failures, row, table
from prefixwise import __version__
from prefixwise.bench.files import now_utc
from prefixwise.models.sources import embedded_model_path
from tests.server.server_process import ServerProcess, server_process

NUM_EXAMPLES = 40  # documents at the end of a task, from which examples are taken
SHOTS = {"zero": ("first_n", 0), "shared": ("first_n", 5), "own": ("default", 5)}  # sampler, examples
BATCH_SIZES = (1, 4, 16)
GPU_BATCH_SIZES = (16, 64, 256)
GPU_CACHE_BYTES = 4 << 30  # our KV cache on a GPU, on which `hf` needs room for logits of whole batches
PROBE_DOCUMENTS = 4  # five-shot, for each batch size; 128 on a GPU
PART_DOCUMENTS = 50  # of `--parts`


class Harness:
    """lm_eval with tasks of a folder."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        from lm_eval.tasks import TaskManager

        self._parts = parts
        self._tasks = TaskManager(include_path=str(folder), include_defaults=False)

    def run_parts(self, get_model: Callable[[], Any], title: str, task: Task, shots: str, chosen: slice) -> Run:
        """Parts that are there are not run again; without a missing one no model is asked for."""
        every = range(len(task.documents) - NUM_EXAMPLES)
        asked = every[chosen]
        if not asked:
            first, limit = chosen.start, chosen.stop
            raise SystemExit(f"--first must be below --limit and {len(every)} ({task.name}), got {first} and {limit}")
        size, found = self._parts.num_documents or len(asked), []
        for first in asked[::size]:
            documents = range(first, min(first + size, asked.stop))

            def make(documents: range = documents) -> dict[str, Any]:
                run = self.run(get_model(), task.name, shots, documents)
                return {**asdict(run), "logprobs": run.logprobs.tolist()}

            part = Run(**self._parts.found(f"{task.name}.{shots}.{title}.{first}-{documents.stop}", make))
            found.append(replace(part, logprobs=np.array(part.logprobs)))
        return Run.of_parts(found)

    def run(self, model: Any, task: str, shots: str, documents: range) -> Run:
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
                samples={name: list(documents)},
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
    def probe_documents(self) -> range:
        return range(128 if self.is_gpu else PROBE_DOCUMENTS)

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
    def device_kind(self) -> str:
        import torch

        return torch.cuda.get_device_name() if self.is_gpu else "cpu"

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


class Models:
    """Each is loaded when it is first asked for."""

    def __init__(self, checkpoint: Checkpoint, harness: Harness, parts: Parts, batch_size: int | None) -> None:
        self._checkpoint, self._harness, self._parts, self._batch_size = checkpoint, harness, parts, batch_size
        self._loaded: dict[str, Any] = {}
        self._servers = ExitStack()

    def get(self, name: str, task: str) -> Any:
        title = self.title(name, task)
        if title not in self._loaded:
            self._loaded[title] = self._load(name, task)
            if self._checkpoint.is_gpu:  # kernels are compiled, and graphs captured, on first use
                self._harness.run(self._loaded[title], task, "own", self._checkpoint.probe_documents)
        return self._loaded[title]

    def title(self, name: str, task: str) -> str:
        """Models of `hf` differ in their batch size."""
        return f"hf-{self.batch_size(task)}" if name == "hf" else name

    def _load(self, name: str, task: str) -> Any:
        if name == "prefixwise":
            return self._checkpoint.ours()
        if name == "local-completions":
            return our_server(self._servers.enter_context(self._checkpoint.server()).url)
        return self._checkpoint.hf(self.batch_size(task), self._checkpoint.softmax_dtype)

    def batch_size(self, task: str) -> int:
        """Of `hf`."""
        if self._batch_size is not None:
            return self._batch_size
        make = partial(best_batch_size, self._harness, task, self._checkpoint)
        return int(self._parts.found(f"{task}.batch_size", lambda: {"size": make()})["size"])

    def softmax_seconds(self, task: str) -> dict[str, Any]:
        """What the dtype of its softmax costs `hf`."""
        checkpoint, size = self._checkpoint, self.batch_size(task)

        def seconds(dtype: str | None) -> float:
            return self._harness.run(checkpoint.hf(size, dtype), task, "shared", checkpoint.probe_documents).seconds

        dtypes = (None, checkpoint.softmax_dtype)
        return self._parts.found(
            f"{task}.softmax-{size}", lambda: {each or "default": seconds(each) for each in dtypes}
        )

    def close(self) -> None:
        self._servers.close()


def measure(
    checkpoint: Checkpoint,
    chosen: slice,
    tasks: Sequence[str],
    shots: Sequence[str],
    names: Sequence[str],
    batch_size: int | None,
    parts_folder: Path | None,
) -> dict[str, Any]:
    rows = []
    with TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/datasets"
        facts = {"machine": {**machine(), "load_average": None}, **asdict(checkpoint)}
        parts = Parts(parts_folder or Path(folder, "parts"), PART_DOCUMENTS if parts_folder else None, facts)
        read = [read_task(name) for name in tasks]
        for task in read:
            write_task(task, Path(folder))
        harness = Harness(Path(folder), parts)
        with closing(Models(checkpoint, harness, parts, batch_size)) as models:
            for task, each in product(read, shots):
                runs = {
                    name: harness.run_parts(
                        partial(models.get, name, task.name), models.title(name, task.name), task, each, chosen
                    )
                    for name in MODELS
                    if name in names
                }
                rows.append(row(task.name, each, runs))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
            of_hf = tasks if "hf" in names else ()
            batch_sizes = {name: models.batch_size(name) for name in of_hf}
            softmax_seconds = {name: models.softmax_seconds(name) for name in of_hf}
    is_exact, goals = checkpoint.dtype == "float32", GPU_GOALS if checkpoint.is_gpu else GOALS
    return {
        "machine": machine(),
        "device": checkpoint.device_kind,
        "hf_batch_sizes": batch_sizes,
        "hf_softmax_seconds": softmax_seconds,
        "rows": rows,
        "failures": failures(rows, is_exact, goals),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="the first documents of every task; default: all")
    parser.add_argument("--first", type=int, help="leave out those before it, which another process runs")
    parser.add_argument("--task", action="append", choices=HARNESS_TASKS, help="default: all")
    parser.add_argument("--shots", action="append", choices=SHOTS, help="default: all")
    parser.add_argument("--batch-size", type=int, help="of hf; default: the fastest on a task's first documents")
    parser.add_argument("--pretrained", help="a folder; default: the embedded model")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--parts", type=Path, metavar="FOLDER", help="keep what was measured, and go on from there")
    parser.add_argument("--backend", default="auto", help="of prefixwise; default: auto")
    given = parser.parse_args()
    checkpoint = Checkpoint(given.pretrained, given.device, given.dtype, given.backend)
    names = given.model or MODELS
    tasks, shots = given.task or HARNESS_TASKS, given.shots or tuple(SHOTS)
    found = measure(checkpoint, slice(given.first, given.limit), tasks, shots, names, given.batch_size, given.parts)
    print(table(found["rows"]))
    command = f"python -m benchmarks.quality.harness {' '.join(sys.argv[1:])}".strip()
    facts = {"command": command, "time": now_utc(), "version": __version__, "commit": commit()}
    print(json.dumps({**facts, **found}))
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
