from __future__ import annotations

from prefixwise.bench.known_models import known_models
from prefixwise.models.checkpoint import open_checkpoint


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
