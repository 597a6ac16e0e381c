"""Models by hub id: from the local cache when they are there, else downloaded; only what we read of them."""

from __future__ import annotations

from pathlib import Path

from prefixwise.contract.errors import ModelLoadError

# Not every *.safetensors: Mistral's repositories hold a second copy of the weights, `consolidated`.
_FILES = [
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def download(model_id: str) -> Path:
    """The local folder of a hub model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model_id, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelLoadError(f"{model_id!r} is neither a local path nor a model the hub gives us: {reason}") from None
    if not folder.is_dir():  # the repository is there, but not one file of it matched
        raise ModelLoadError(f"the hub's {model_id!r} has none of the files that we read: {', '.join(_FILES)}")
    return folder
