from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwise.bench.tokens import TokenFacts, known_models, token_facts
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.sources import open_checkpoint
from tests.models.hub_cache import add_to_cache

EMBEDDED_FACTS = TokenFacts(
    "SmolLM2-135M-Instruct.Q4_1", "its own tokenizer", 49_152, 49_152, tuple(range(17)), 2, (10_539, 5_230)
)


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whatever this machine has in its cache: here it has what the test puts there."""
    home = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    return home


def answers_of(folder: Path) -> tuple[int, ...]:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary["Yes"], vocabulary["No"]


@pytest.mark.parametrize("name", ["embedded", "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1"])
def test_the_embedded_model_is_asked_by_any_of_its_names(name: str) -> None:
    assert token_facts(name) == EMBEDDED_FACTS


def test_a_folder_is_asked_for_its_tokenizer(checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of("qwen3")
    expected = TokenFacts(str(folder), "its own tokenizer", 512, 400, (0, 1, 2, 3), answer_ids=answers_of(folder))
    assert token_facts(str(folder)) == expected


def test_added_tokens_count_as_special_and_eos_is_found(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("qwen3"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][3]["special"] = False  # <|im_end|>
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    facts = token_facts(str(folder))
    assert (facts.special_ids, facts.eos_id) == ((0, 1, 2, 3), 1)


def test_a_model_without_a_tokenizer_has_a_vocabulary(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("qwen3"), folder)
    (folder / "tokenizer.json").unlink()
    expected = TokenFacts(str(folder), "its vocabulary, as it has no tokenizer", 512, 512, ())
    assert token_facts(str(folder)) == expected


def test_a_known_model_needs_no_files() -> None:
    facts = token_facts("Qwen/Qwen3-1.7B")
    assert (facts.vocab_size, facts.num_tokens, facts.eos_id) == (151_936, 151_669, 151_645)
    assert facts.special_ids == tuple(range(151_643, 151_669))
    assert facts.source == "what is known of it, as it is not on this machine"


@pytest.mark.parametrize("model", ["someone/absent", "no-such-folder", "not an/id at all"])
def test_a_model_of_which_nothing_is_known_is_one_clear_error(model: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^'{model}' is not on this machine, and nothing is known of its token"):
        token_facts(model)


def test_a_folder_that_is_no_model_is_not_looked_up_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a model folder"):
        token_facts(str(tmp_path))


def test_the_hubs_cache_comes_before_what_is_known(checkpoint_of: Callable[[str], Path], cache_home: Path) -> None:
    folder = checkpoint_of("qwen3")
    add_to_cache(cache_home, "Qwen/Qwen3-0.6B", folder)
    expected = TokenFacts("Qwen/Qwen3-0.6B", "its own tokenizer", 512, 400, (0, 1, 2, 3), None, answers_of(folder))
    assert token_facts("Qwen/Qwen3-0.6B") == expected


def test_half_a_cached_model_leaves_what_is_known(checkpoint_of: Callable[[str], Path], cache_home: Path) -> None:
    for model in ("Qwen/Qwen3-0.6B", "someone/half"):
        add_to_cache(cache_home, model, checkpoint_of("qwen3") / "config.json")
    assert token_facts("Qwen/Qwen3-0.6B").vocab_size == 151_936
    with pytest.raises(ModelLoadError, match=r"lacks the weight file model\.safetensors"):
        token_facts("someone/half")


def test_a_known_model_that_was_cached_without_a_tokenizer_keeps_its_own_vocabulary(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, cache_home: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("qwen3"), folder)
    (folder / "tokenizer.json").unlink()
    add_to_cache(cache_home, "Qwen/Qwen3-0.6B", folder)
    source = "what is known of it, as it has no tokenizer here"
    assert token_facts("Qwen/Qwen3-0.6B") == TokenFacts("Qwen/Qwen3-0.6B", source, 512, 512, ())


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", reach)
    monkeypatch.setattr("socket.getaddrinfo", reach)
    assert token_facts("Qwen/Qwen3-4B").vocab_size == 151_936


def test_the_contracts_models_are_known() -> None:
    sizes = ("0.6B", "1.7B", "4B", "8B")
    for known in (known_models()[f"Qwen/Qwen3-{size}"] for size in sizes):
        assert known.vocab_size == 151_936
        assert known.num_tokens == 151_669
        assert known.special_ids == tuple(range(151_643, 151_669))
        assert known.eos_id == 151_645


def test_every_special_token_is_in_the_vocabulary() -> None:
    for name, known in known_models().items():
        assert 0 <= min(known.special_ids) <= max(known.special_ids) < known.num_tokens <= known.vocab_size, name
        assert known.eos_id in known.special_ids, name


def test_what_is_known_of_the_embedded_model_is_what_its_file_says() -> None:
    checkpoint = open_checkpoint()
    files = checkpoint.read_tokenizer_files()
    known = known_models()["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert known.vocab_size == checkpoint.config.vocab_size
    assert known.num_tokens == files.tokenizer.get_vocab_size()
    assert known.special_ids == tuple(sorted(files.special_ids))
    assert known.eos_id == files.tokenizer.token_to_id(files.special_tokens["eos_token"])
