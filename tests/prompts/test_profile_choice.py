"""Which profile goes with a checkpoint: the one asked for, by name, by head, or the one for any model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import ProfileError
from prefixwise.models.checkpoint import Checkpoint, StoredTensor, TokenizerFiles, names_of
from prefixwise.prompts.profile import parse_profile
from prefixwise.prompts.profile_choice import (
    ProfileChoice,
    builtin_profile,
    builtin_profiles,
    choose_profile,
    find_profile,
    needed_profile,
    profile_of,
    profile_of_any_model,
    read_profile,
)
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.reranker_tokenizers import VOCAB_SIZE, read_text_tokenizer

SIZE = 32
MINE = parse_profile(
    {"name": "mine", "relevance": "logit", "labels": ["1"], "prompt": {"body": ["{query}", "{document}"]}}, "x"
)


@dataclass(frozen=True)
class InMemory(StoredTensor):
    values: NDArray[Any]

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return self.values[start:stop]


def tensor(values: NDArray[Any], dtype: Any = "float32") -> InMemory:
    return InMemory(values.shape, dtype, values)


EMBEDDING: NDArray[np.float32] = np.random.default_rng(0).standard_normal((VOCAB_SIZE, SIZE)).astype(np.float32)


def checkpoint(
    *names: str, family: str = "qwen3", head: InMemory | None = None, embedding: InMemory | None = None
) -> Checkpoint:
    """One of these names; a classifier if it has a head."""
    config = FakeBackend(VOCAB_SIZE).config
    config = replace(config, family=family, num_classes=0 if head is None else head.shape[0])
    tensors = {"embedding": embedding or tensor(EMBEDDING)} | ({} if head is None else {"head": head})

    def no_files() -> TokenizerFiles:
        raise AssertionError("the tokenizer has been read already")

    return Checkpoint(names[0], Path("x"), config, tensors, no_files, names)


def chosen(choice: ProfileChoice) -> str:
    assert choice.default is not None
    return choice.default.name


@pytest.mark.parametrize(
    ("name", "family", "profile"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "qwen3", "qwen3-reranker"),
        ("/models/Qwen3-Reranker-8B-GPTQ", "qwen3", "qwen3-reranker"),
        ("qwen3-reranker-4b-q8_0", "qwen3", "qwen3-reranker"),
        ("tomaarsen/Qwen3-Reranker-0.6B-seq-cls", "qwen3", "qwen3-reranker"),
        ("mixedbread-ai/mxbai-rerank-base-v2", "qwen2", "mxbai-rerank-v2"),
        ("mixedbread-ai/mxbai-rerank-large-v2", "qwen2", "mxbai-rerank-v2"),
        ("BAAI/bge-reranker-v2-gemma", "gemma", "bge-reranker-v2-gemma"),
        ("zeroentropy/zerank-1", "qwen3", "zerank"),
        ("zeroentropy/zerank-1-small-reranker", "qwen3", "zerank"),
        ("zeroentropy/zerank-2", "qwen3", "zerank"),
        ("ContextualAI/ctxl-rerank-v2-instruct-multilingual-1b", "qwen3", "ctxl-rerank-v2"),
        ("ContextualAI/ctxl-rerank-v2-instruct-multilingual-6b", "mistral", "ctxl-rerank-v2"),
        ("nvidia/llama-nemotron-rerank-1b-v2", "llama_bidirec", "llama-nemotron-rerank"),
        ("/models/trained-by-us", "llama_bidirec", "llama-nemotron-rerank"),  # the architecture has one recipe
    ],
)
def test_a_reranker_is_known_by_its_name(name: str, family: str, profile: str) -> None:
    choice = choose_profile(None, checkpoint(name, family=family), None)
    assert chosen(choice) == profile
    assert choice.warning is None
    assert choice.reason == f"the model is called {name}"


def test_a_folder_above_may_be_called_anything() -> None:
    choice = choose_profile(None, checkpoint("/data/qwen3-reranker-eval/Qwen3-0.6B", family="qwen3"), None)
    assert chosen(choice) == "chat-yes-no"


def test_any_of_a_checkpoints_names_will_do() -> None:
    choice = choose_profile(None, checkpoint("/models/final", "final", "Qwen/Qwen3-Reranker-4B"), None)
    assert (chosen(choice), choice.reason) == ("qwen3-reranker", "the model is called Qwen/Qwen3-Reranker-4B")


def test_a_snapshot_in_the_hubs_cache_is_known_by_the_models_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / ("a" * 40)
    names = names_of(str(snapshot), snapshot)
    assert names[-1] == "Qwen/Qwen3-Reranker-0.6B"
    assert chosen(choose_profile(None, checkpoint(*names), None)) == "qwen3-reranker"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "llama"),
        ("mixedbread-ai/mxbai-rerank-base-v2", "qwen3"),
        ("BAAI/bge-reranker-v2-gemma", "qwen3"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("mixedbread-ai/mxbai-rerank-base-v1", "qwen2"),
        ("BAAI/bge-reranker-v2-m3", "gemma"),
    ],
)
def test_another_family_or_name_is_another_model(name: str, family: str) -> None:
    choice = choose_profile(None, checkpoint(name, family=family), None)
    assert chosen(choice) == "chat-yes-no"
    assert choice.warning is not None
    assert choice.warning.startswith(f"no reranker profile is known for {name}, so chat-yes-no was used; ")
    assert choice.warning.endswith("for a model that was trained to rerank, name its own profile")


def test_what_is_asked_for_is_taken_whatever_the_name() -> None:
    choice = choose_profile(MINE, checkpoint("Qwen/Qwen3-Reranker-0.6B"), None)
    assert (choice.default, choice.warning, choice.reason) == (MINE, None, "asked for")
    assert set(choice.by_name) == {*builtin_profiles(), "mine"}


def test_a_request_may_name_any_profile_of_ours_and_the_one_asked_for() -> None:
    choice = choose_profile(MINE, checkpoint("x"), None)
    assert profile_of(choice, None) is MINE
    assert profile_of(choice, "default") is MINE
    assert profile_of(choice, "mine") is MINE
    assert profile_of(choice, "plain") is builtin_profile("plain")
    with pytest.raises(ProfileError, match=r'profile must be one of bge-reranker-v2-gemma, .*, mine, got "yours"'):
        profile_of(choice, "yours")


def test_a_chat_model_is_asked_in_its_own_template(text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    choice = profile_of_any_model("my/model", text_tokenizer("qwen"))
    assert chosen(choice) == "chat-yes-no"
    assert choice.warning is not None
    assert "for my/model, so chat-yes-no was used; for a model that" in choice.warning


def test_a_model_without_a_chat_template_is_asked_plainly(text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    choice = choose_profile(None, checkpoint("my/model"), text_tokenizer("gpt2"))
    assert chosen(choice) == "question-yes-no"
    assert choice.warning is not None
    assert "so question-yes-no was used (it has no chat template); " in choice.warning


def test_a_chat_template_that_fails_is_as_good_as_none(tokenizer_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for file in tokenizer_folder("qwen").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('ask me otherwise') }}")
    choice = profile_of_any_model("my/model", read_text_tokenizer(tmp_path))
    assert chosen(choice) == "question-yes-no"
    assert choice.warning is not None
    assert "(the checkpoint's chat template fails: ask me otherwise); " in choice.warning


class TestHeads:
    """Classifiers with a name that says nothing."""

    @pytest.fixture
    def tokenizer(self, text_tokenizer: Callable[[str], TextTokenizer]) -> TextTokenizer:
        return text_tokenizer("qwen")

    @staticmethod
    def row(tokenizer: TextTokenizer, label: str) -> NDArray[np.float32]:
        token_id = tokenizer.token_id(label)
        assert token_id is not None
        row: NDArray[np.float32] = EMBEDDING[token_id]
        return row

    @pytest.mark.parametrize(
        ("family", "labels", "profile"),
        [
            ("qwen3", ("yes", "no"), "qwen3-reranker"),
            ("qwen2", ("1", "0"), "mxbai-rerank-v2"),
            ("gemma", ("Yes",), "bge-reranker-v2-gemma"),
            ("qwen3", ("Yes",), "zerank"),
            ("qwen3", ("!",), "ctxl-rerank-v2"),  # token 0
        ],
    )
    @pytest.mark.parametrize("scale", [1.0, 0.25])
    def test_a_head_of_one_row_is_known(
        self, family: str, labels: tuple[str, ...], profile: str, scale: float, tokenizer: TextTokenizer
    ) -> None:
        rows = [self.row(tokenizer, label) for label in labels]
        head = tensor((rows[0] - rows[1] if len(rows) == 2 else rows[0])[None] * np.float32(scale))
        choice = choose_profile(None, checkpoint("x", family=family, head=head), tokenizer)
        assert (chosen(choice), choice.warning) == (profile, None)
        assert choice.reason == "the model's head is made of its labels' rows"

    def test_a_head_of_two_rows_is_no_and_yes(self, tokenizer: TextTokenizer) -> None:
        head = tensor(np.stack([self.row(tokenizer, "no"), self.row(tokenizer, "yes")]))
        assert chosen(choose_profile(None, checkpoint("x", head=head), tokenizer)) == "qwen3-reranker"

    def test_rows_in_bfloat16_are_read_as_such(self, tokenizer: TextTokenizer) -> None:
        def bits(values: NDArray[np.float32]) -> InMemory:
            return tensor((values.view(np.uint32) >> 16).astype(np.uint16), "bfloat16")

        row = self.row(tokenizer, "yes") - self.row(tokenizer, "no")
        found = checkpoint("x", head=bits(row[None]), embedding=bits(EMBEDDING))
        assert chosen(choose_profile(None, found, tokenizer)) == "qwen3-reranker"

    @pytest.mark.parametrize("kind", ["turned round", "other words", "random", "zero", "rows the other way round"])
    def test_another_head_is_not(self, kind: str, tokenizer: TextTokenizer) -> None:
        yes, no = self.row(tokenizer, "yes"), self.row(tokenizer, "no")
        rows = {
            "turned round": (no - yes)[None],
            "other words": (self.row(tokenizer, "the") - no)[None],
            "random": np.random.default_rng(1).standard_normal((1, SIZE)).astype(np.float32),
            "zero": np.zeros((1, SIZE), np.float32),
            "rows the other way round": np.stack([yes, no]),
        }
        choice = choose_profile(None, checkpoint("x", head=tensor(rows[kind])), tokenizer)
        assert (choice.default, choice.warning) == (None, None)

    def test_a_head_that_fits_several_profiles_gets_the_first_and_a_warning(self, tokenizer: TextTokenizer) -> None:
        rows = EMBEDDING.copy()
        rows[tokenizer.token_id("Yes")] = rows[0]  # the labels of zerank and ctxl-rerank-v2
        choice = choose_profile(None, checkpoint("x", head=tensor(rows[:1]), embedding=tensor(rows)), tokenizer)
        assert (chosen(choice), choice.warning) == (
            "ctxl-rerank-v2",
            "the model's head fits the profiles ctxl-rerank-v2, zerank, so ctxl-rerank-v2 was used; choose one with "
            "--profile, or name it in the request",
        )

    def test_the_family_must_fit_too(self, tokenizer: TextTokenizer) -> None:
        head = tensor((self.row(tokenizer, "yes") - self.row(tokenizer, "no"))[None])
        assert choose_profile(None, checkpoint("x", family="llama", head=head), tokenizer).default is None

    def test_without_a_tokenizer_nothing_is_known(self, tokenizer: TextTokenizer) -> None:
        head = tensor((self.row(tokenizer, "yes") - self.row(tokenizer, "no"))[None])
        assert choose_profile(None, checkpoint("x", head=head), None).default is None

    def test_labels_beyond_the_embedding_are_not_looked_up(self, tokenizer: TextTokenizer) -> None:
        head = tensor((self.row(tokenizer, "yes") - self.row(tokenizer, "no"))[None])
        found = checkpoint("x", head=head, embedding=tensor(EMBEDDING[:100]))
        assert choose_profile(None, found, tokenizer).default is None

    def test_an_unknown_classifier_needs_a_profile(self, tokenizer: TextTokenizer) -> None:
        choice = choose_profile(None, checkpoint("x", head=tensor(-EMBEDDING[:1])), tokenizer)
        with pytest.raises(ProfileError) as caught:
            profile_of(choice, None)
        assert str(caught.value) == (
            "the model is a classifier that no profile is known for: choose one with --profile; "
            f"known profiles are {', '.join(RERANKERS)}; or write one, a .toml file, with classifier = true for a head "
            "of one row"
        )
        assert needed_profile(choice) == str(caught.value)
        assert profile_of(choice, "qwen3-reranker").name == "qwen3-reranker"

    def test_a_classifier_of_many_classes_has_none_and_says_why(self, tokenizer: TextTokenizer) -> None:
        choice = choose_profile(None, checkpoint("m", head=tensor(EMBEDDING[:5])), tokenizer)
        assert (choice.default, choice.can_rerank, needed_profile(choice)) == (None, False, None)
        with pytest.raises(ProfileError, match="this model is a classifier of 5 classes"):
            profile_of(choice, None)

    def test_a_classifier_with_a_name_is_known_by_it(self, tokenizer: TextTokenizer) -> None:
        found = checkpoint("me/Qwen3-Reranker-mine", head=tensor(EMBEDDING[:1]))
        assert chosen(choose_profile(None, found, tokenizer)) == "qwen3-reranker"


def test_a_profile_of_ours_is_for_models_that_are_called_so() -> None:
    """Those without a name are for any model."""
    assert [name for name, profile in builtin_profiles().items() if profile.names] == RERANKERS


# Profiles by name and by path


MINE_TOML = """
name = "mine"
relevance = "logit_diff"
labels = ["1", "0"]
[prompt]
body = ["{query}", "{document}"]
"""
NAMES = [
    *("bge-reranker-v2-gemma", "chat-yes-no", "ctxl-rerank-v2", "llama-nemotron-rerank", "mxbai-rerank-v2"),
    *("plain", "question-yes-no", "qwen3-reranker", "zerank"),
]
RERANKERS = [name for name in NAMES if name not in ("chat-yes-no", "plain", "question-yes-no")]


def write(folder: Path, content: str | bytes, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_ours_are_legal_and_known_by_their_names() -> None:
    assert list(builtin_profiles()) == NAMES
    assert all(profile.name == name for name, profile in builtin_profiles().items())
    assert all(profile.description for profile in builtin_profiles().values())


def test_what_ours_fall_back_on_is_ours_too() -> None:
    named = [profile.without_chat_template for profile in builtin_profiles().values() if profile.chat]
    assert [builtin_profile(name).chat for name in named if name is not None] == [False]


def test_a_name_finds_one_of_ours() -> None:
    assert find_profile("qwen3-reranker") is builtin_profile("qwen3-reranker")


def test_an_unknown_name_lists_all_names() -> None:
    with pytest.raises(ProfileError) as caught:
        find_profile("qwen-reranker")
    assert str(caught.value) == (
        f'no profile is called "qwen-reranker"; expected {", ".join(NAMES)}, or a path that ends in .toml'
    )


@pytest.mark.parametrize("as_text", [True, False])
def test_a_path_finds_a_users_file(as_text: bool, tmp_path: Path) -> None:
    path = write(tmp_path, MINE_TOML)
    profile = find_profile(str(path) if as_text else path)
    assert (profile.name, profile.labels) == ("mine", ("1", "0"))


def test_a_path_may_have_any_name(tmp_path: Path) -> None:
    assert find_profile(write(tmp_path, MINE_TOML, "qwen3-reranker")).name == "mine"
    assert find_profile(str(tmp_path / "qwen3-reranker")).name == "mine"


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, MINE_TOML)
    assert find_profile("~/mine.toml").name == "mine"


def test_a_home_that_nobody_has_is_named() -> None:
    with pytest.raises(ProfileError, match=r"mine\.toml cannot be read"):
        find_profile("~nobody-is-called-so/mine.toml")


@pytest.mark.parametrize("name", ["nothing.toml", "none/there.toml"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=f"{name} cannot be read: No such file or directory"):
        find_profile(str(tmp_path / name))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        find_profile(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("name = mine", "is not TOML: "),
        ('{"name": "mine"}', "is not TOML: "),
        (MINE_TOML + 'name = "twice"', "is not a profile: prompt.name is unknown"),
        ('name = "a"\nname = "b"', "is not TOML: "),
        (b"name = '\xff'", "is not UTF-8: "),
        ("", "is not a profile: "),
        (
            MINE_TOML.replace("{document}", "{text}"),
            "unknown placeholder {text}; expected {query}, {document}, {instruction}",
        ),
        (MINE_TOML.replace('"1", "0"', '"1"'), 'labels: relevance "logit_diff" takes 2, got 1'),
    ],
)
def test_a_file_that_is_no_profile_is_told_why(content: str | bytes, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ProfileError) as caught:
        find_profile(path)
    assert str(caught.value).startswith(f"{path} is no")
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["plain", "qwen3-reranker"])
def test_a_name_of_ours_is_taken(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, MINE_TOML.replace("mine", name))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(caught.value) == f'{path} is not a profile: name "{name}" is taken; choose another name'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "default"}, 'name "default" is taken'),
        ({"relevance": "from_request", "labels": []}, 'relevance "from_request" is that of plain'),
        (
            {
                "prompt": {
                    "chat": True,
                    "body": ["{query}", "{document}"],
                    "after": ["?"],
                    "without_chat_template": "no",
                }
            },
            'prompt.without_chat_template must be one of bge-reranker-v2-gemma, .*, got "no"',
        ),
    ],
)
def test_what_only_our_own_files_may_say(change: dict[str, object], message: str, tmp_path: Path) -> None:
    data = {**tomllib.loads(MINE_TOML), **change}
    path = tmp_path / "mine.toml"
    path.write_text(toml_text(data))
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def toml_text(data: dict[str, object]) -> str:
    """JSON's values are TOML's, but for objects."""
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if key not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines)
