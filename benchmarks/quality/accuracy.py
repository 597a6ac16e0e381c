"""The embedded model on ten tasks of BIG-bench, zero-shot, and on the Lee corpus: prefixwise against transformers.

    python -m benchmarks.quality.accuracy --documents 50 --texts 16        the last line on stdout is JSON

A document's answer is the choice with the highest log-likelihood; `chance` is that of a guess. Lee: two texts are as
similar as each is more likely behind the other one than behind a text on nothing (their mean, per token); its rank
correlation with what people say. Both engines read the same tokens, in float32; transformers one sequence at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu.__main__ import machine
from benchmarks.goals.__main__ import commit
from benchmarks.quality.data import TASKS, Task, read_lee, read_task
from prefixwise import Scorer, __version__
from prefixwise.bench.files import now_utc
from prefixwise.engine.likelihoods import Likelihoods
from prefixwise.models.sources import embedded_model_path
from prefixwise.plan.likelihoods import TokenSequence
from prefixwise.prompts.tokenizer import TextTokenizer

Read = Callable[[Sequence[TokenSequence]], NDArray[np.float64]]  # log-likelihoods of what is read of each sequence
LEE_PROMPT = "News: {}\n\nMore news on the same subject: "
NOTHING = "There is no news today."


class Reader:
    """Log-likelihoods by one engine, and the seconds that they took."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.seconds = 0.0

    def __call__(self, sequences: Sequence[TokenSequence]) -> NDArray[np.float64]:
        begin = perf_counter()
        found = self._read(sequences)
        self.seconds += perf_counter() - begin
        return found


def by_transformers() -> Read:
    from tests.reference import Reference

    path = embedded_model_path()
    reference = Reference.load(path.parent, gguf_file=path.name)

    def read(sequences: Sequence[TokenSequence]) -> NDArray[np.float64]:
        split = [(each.token_ids[: each.first].tolist(), each.token_ids[each.first :].tolist()) for each in sequences]
        return np.array([reference.sequence_logprob(context, rest) for context, rest in split])

    return read


def pair(tokenizer: TextTokenizer, context: str, continuation: str) -> TokenSequence:
    """Blanks at the end of the context belong to the continuation, as in lm-evaluation-harness."""
    stripped = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    return TokenSequence(whole, len(tokenizer.encode(stripped)))


def score_task(task: Task, num_documents: int, tokenizer: TextTokenizer, readers: dict[str, Reader]) -> dict[str, Any]:
    documents = task.documents[:num_documents]
    sequences = [pair(tokenizer, task.description + each.text, choice) for each in documents for choice in each.choices]
    found = {name: reader(sequences) for name, reader in readers.items()}
    ends = np.cumsum([len(each.choices) for each in documents])
    answers = {name: [int(part.argmax()) for part in np.split(logprobs, ends[:-1])] for name, logprobs in found.items()}
    golds = [each.gold for each in documents]
    return {
        "task": task.name,
        "documents": len(documents),
        "chance": float(np.mean([1 / len(each.choices) for each in documents])),
        "accuracy": {name: float(np.mean(np.equal(given, golds))) for name, given in answers.items()},
        "same_answers": answers["prefixwise"] == answers["transformers"],
        "max_difference": float(np.abs(found["prefixwise"] - found["transformers"]).max()),
    }


def score_lee(num_texts: int, tokenizer: TextTokenizer, readers: dict[str, Reader]) -> dict[str, Any]:
    texts, judged = read_lee()
    texts = texts[:num_texts]
    pairs = list(combinations(range(len(texts)), 2))
    sequences = [pair(tokenizer, LEE_PROMPT.format(each), text) for each in (*texts, NOTHING) for text in texts]
    sizes = np.array([len(each.token_ids) - each.first for each in sequences]).reshape(-1, len(texts))
    found = {name: reader(sequences).reshape(-1, len(texts)) for name, reader in readers.items()}
    gains = {name: each[:-1] / sizes[:-1] - each[-1] / sizes[-1] for name, each in found.items()}
    of_people = [judged[each] for each in pairs]
    return {
        "texts": len(texts),
        "pairs": len(pairs),
        "rank_correlation": {
            name: rank_correlation([gain[i, j] + gain[j, i] for i, j in pairs], of_people)
            for name, gain in gains.items()
        },
        "max_difference": float(np.abs(found["prefixwise"] - found["transformers"]).max()),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return means[places]


def measure(num_documents: int, num_texts: int) -> dict[str, Any]:
    with Scorer(dtype="float32", device="cpu") as scorer:
        likelihoods, tokenizer = Likelihoods(scorer.engine), scorer.engine.tokenizer
        assert tokenizer is not None, "the embedded model has one"
        ours = Reader(lambda sequences: np.array([each.total for each in likelihoods.read(sequences)]))
        readers = {"prefixwise": ours, "transformers": Reader(by_transformers())}
        rows = []
        for name in TASKS:
            rows.append(score_task(read_task(name), num_documents, tokenizer, readers))
            print(line(rows[-1]), file=sys.stderr)
        lee = score_lee(num_texts, tokenizer, readers)
    return {"rows": rows, "lee": lee, "seconds": {name: each.seconds for name, each in readers.items()}}


def line(row: dict[str, Any]) -> str:
    ours, theirs = (row["accuracy"][name] for name in ("prefixwise", "transformers"))
    return (
        f"| {row['task']} | {row['documents']} | {row['chance']:.2f} | {ours:.2f} | {theirs:.2f} | "
        f"{row['max_difference']:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100, help="of every task")
    parser.add_argument("--texts", type=int, default=20, help="of Lee's 50: every one is read behind every other one")
    given = parser.parse_args()
    found = measure(given.documents, given.texts)
    print("| task | documents | chance | prefixwise | transformers | difference |\n|---|---:|---:|---:|---:|---:|")
    print("\n".join(map(line, found["rows"])))
    command = f"python -m benchmarks.quality.accuracy {' '.join(sys.argv[1:])}".strip()
    facts = {"command": command, "time": now_utc(), "version": __version__, "commit": commit(), "machine": machine()}
    print(json.dumps({**facts, **found}))


if __name__ == "__main__":
    main()
