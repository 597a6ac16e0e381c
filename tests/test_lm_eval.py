"""The model class for lm-evaluation-harness against its own model `hf`: same tokens, same log-likelihoods.

lm_eval and its packages would change those of all other tests, so `make test-clients` runs this file in an environment
of its own. Elsewhere it is skipped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed; `make test-clients` runs these tests")
pytest.importorskip("torch")

import lm_eval
from lm_eval.models.huggingface import HFLM

from prefixwise.cli.main import main
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError
from prefixwise.lm_eval import PrefixwiseLM
from tests.checkpoints import add_tokenizer, make_hf_checkpoint

# Warnings of lm_eval's and its packages' own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

MAX_LENGTH = 300  # KV blocks have 128 tokens
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAIRS = (
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a large city"),
    ("The capital of France is ", "Paris"),  # the blank goes to the continuation
    ("A list:\n\n", "first, second"),
    ("", "No context."),
    ("", "</s> after the prefix token"),
    ("</s>It begins with the prefix token", " yes"),
    ("word " * 150, "the end of a long text" * 8),
    ("word " * 400, "cut"),
    ("Ünïcödé 🙂", " 🙂🙂"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_hf_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=MAX_LENGTH)
    add_tokenizer(path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[PrefixwiseLM]:
    model = PrefixwiseLM(str(folder), device="cpu", backend="torch", dtype="float32")
    yield model
    model.close()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return HFLM(str(folder), device="cpu", dtype="float32", batch_size=2)


def requests(*args: tuple[str, ...]) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="a task") for each in args]


def test_log_likelihoods_are_those_of_hf(ours: PrefixwiseLM, theirs: Any) -> None:
    found = ours.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    expected = theirs.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    np.testing.assert_allclose([each[0] for each in found], [each[0] for each in expected], atol=1e-4)
    assert [each[1] for each in found] == [each[1] for each in expected]


def test_a_greedy_continuation_is_one(ours: PrefixwiseLM) -> None:
    context = ours.tok_encode("Any context")
    best = int(ours._likelihoods.read([ours._sequence(context, [7])])[0].top_ids[0, 0])
    other = (best + 1) % 400
    answers = ours._loglikelihood_tokens([(None, context, [best]), (None, context, [other])], disable_tqdm=True)
    assert [is_greedy for _, is_greedy in answers] == [True, False]


def test_rolling_log_likelihoods_are_those_of_hf(ours: PrefixwiseLM, theirs: Any) -> None:
    texts = requests(("A short text.",), ("word and word " * 200,))
    found = ours.loglikelihood_rolling(texts, disable_tqdm=True)
    np.testing.assert_allclose(found, theirs.loglikelihood_rolling(texts, disable_tqdm=True), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("bos", [False, True])
def test_tokens_are_those_of_hf(tmp_path: Path, bos: bool, add_bos_token: bool | None) -> None:
    """With a tokenizer that puts BOS before texts, and with one that has it and does not."""
    folder = add_tokenizer(make_hf_checkpoint(tmp_path, "llama"), bos=bos)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "</s>"}))
    ours = PrefixwiseLM(str(folder), device="cpu", backend="torch", add_bos_token=add_bos_token)
    theirs = HFLM(str(folder), device="cpu", add_bos_token=add_bos_token)
    for text in ("A text", "<s>BOS is there", "", " blank"):
        assert ours.tok_encode(text) == theirs.tok_encode(text), text
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)
    for pair in (("A context ", "and more"), ("A context", " and more")):
        assert [ids.tolist() for ids in ours._encode_pair(*pair)] == [*theirs._encode_pair(*pair)]
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    ours.close()


def test_chats_are_those_of_hf(ours: PrefixwiseLM, theirs: Any) -> None:
    chat = [{"role": "user", "content": "Hello "}, {"role": "assistant", "content": "Hi"}]
    for is_answered in (True, False):
        assert ours.apply_chat_template(chat, is_answered) == theirs.apply_chat_template(chat, is_answered)
    with_system = [{"role": "system", "content": "Be brief."}, chat[0]]  # this template refuses it
    assert ours.apply_chat_template(with_system) == theirs.apply_chat_template(with_system)
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE


def test_lm_evals_cache_gets_every_answer(ours: PrefixwiseLM, monkeypatch: pytest.MonkeyPatch) -> None:
    added: dict[tuple[str, Any], Any] = {}
    hook = SimpleNamespace(add_partial=lambda kind, args, answer: added.update({(kind, args): answer}))
    monkeypatch.setattr(ours, "cache_hook", hook)
    monkeypatch.setattr("prefixwise.lm_eval._CALL_TOKENS", 40)  # several calls of the engine
    answers = ours.loglikelihood(requests(*PAIRS[:5]), disable_tqdm=True)
    rolling = ours.loglikelihood_rolling(requests(("A text",)), disable_tqdm=True)
    expected = dict[tuple[str, Any], Any]({("loglikelihood_rolling", ("A text",)): rolling[0]})
    expected |= {("loglikelihood", pair): answer for pair, answer in zip(PAIRS[:5], answers, strict=True)}
    assert added == expected


def test_generation_is_refused(ours: PrefixwiseLM) -> None:
    with pytest.raises(InvalidRequestError, match="generates no text, which these tasks ask for: a task"):
        ours.generate_until(requests(("a", "b")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peft": "x", "parallelize": True}, "unknown model_args: peft, parallelize; expected pretrained, backend"),
        ({"max_length": MAX_LENGTH + 1}, "max_length must be a whole number from 1 to 300"),
        ({"add_bos_token": "yes"}, "add_bos_token must be True or False, got 'yes'"),
        ({"add_bos_token": True}, "add_bos_token must be False or None for a tokenizer without BOS"),
        ({"enable_thinking": True}, "enable_thinking must be False"),
    ],
)
def test_a_wrong_argument_is_named(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        PrefixwiseLM(str(folder), device="cpu", backend="torch", **arguments)


def test_a_device_is_given_once(folder: Path) -> None:
    """lm_eval's program passes cuda:0 where none is given."""
    arguments = {"pretrained": str(folder), "backend": "torch"}
    for given, other in (({"device": "cpu"}, "cuda:0"), ({}, "cpu"), ({"device": "cpu"}, None)):
        model = PrefixwiseLM.create_from_arg_obj({**arguments, **given}, {"device": other, "batch_size": 1})
        assert model.device.startswith("cpu")
        model.close()
    with pytest.raises(InvalidValueError, match="device must be given once, got 'cuda:1' and 'cpu' in model_args"):
        PrefixwiseLM.create_from_arg_string(f"pretrained={folder},device=cpu", {"device": "cuda:1"})


def test_a_batch_size_is_reported_as_unused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "prefixwise"):
        PrefixwiseLM(str(folder), device="cpu", backend="torch", batch_size=1, max_batch_size=None).close()
        assert caplog.messages == []
        PrefixwiseLM(str(folder), device="cpu", backend="torch", batch_size="auto").close()
    assert caplog.messages == ["batch_size=auto is not used: the engine fills its forwards by itself"]


def test_an_empty_continuation_is_refused(ours: PrefixwiseLM) -> None:
    with pytest.raises(InvalidValueError, match="a continuation of 1 to 300 tokens"):
        ours.loglikelihood(requests(("context", "")), disable_tqdm=True)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task of six documents."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = [{"text": f"{n} plus one is", "choices": [f" {n + 1}", " nothing"], "gold": 0} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "task": "adding",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "adding.yaml").write_text(json.dumps(settings))
    return tmp_path


def test_lm_eval_runs_a_task(ours: PrefixwiseLM, theirs: Any, task: Path) -> None:
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(task), include_defaults=False)
    results = [
        lm_eval.simple_evaluate(model=model, tasks=["adding"], task_manager=tasks, num_fewshot=2, bootstrap_iters=0)
        for model in (ours, theirs)
    ]
    found, expected = (each["results"]["adding"]["acc,none"] for each in results)
    assert found == expected
    assert results[0]["config"]["model_dtype"] == "float32"


def test_an_error_of_lm_eval_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> None:
        raise ValueError("Tasks not found: nothing")

    monkeypatch.setattr("prefixwise.lm_eval.run_program", fail)
    with pytest.raises(SystemExit) as ended:
        main(["lm-eval", "--tasks", "nothing"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: lm_eval: Tasks not found: nothing\nhint: ")


def test_the_program_evaluates(folder: Path, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = task / "results"
    with pytest.raises(SystemExit) as ended:
        model_args = f"pretrained={folder},device=cpu,backend=torch,dtype=float32"
        of_task = ("--tasks", "adding", "--include_path", str(task), "-f", "1")
        main(["lm-eval", *of_task, "--output_path", str(output), "--model_args", model_args])
    assert not ended.value.code
    assert "|adding|" in capsys.readouterr().out
    (path,) = output.rglob("results_*.json")
    assert json.loads(path.read_text())["config"]["model"] == "prefixwise"
