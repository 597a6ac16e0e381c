"""What a job is: its input as it was found, its options, and the parts that it was cut into. As JSON, to resume by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from hashlib import sha256

from prefixwise.batch.parts import InputFile, Part
from prefixwise.contract.errors import BatchError

_FORMAT = 1
_KEY_LETTERS = 12


@dataclass(frozen=True)
class Manifest:
    """All that decides about the output."""

    files: tuple[InputFile, ...]
    options: Mapping[str, object]  # plain JSON
    parts: tuple[Part, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @cached_property
    def key(self) -> str:
        """Short, and another for every other job."""
        return sha256(self.to_json()).hexdigest()[:_KEY_LETTERS]

    def to_json(self) -> bytes:
        content = {
            "format": _FORMAT,
            "options": self.options,
            "files": [asdict(file) for file in self.files],
            "parts": [astuple(part)[1:] for part in self.parts],
        }
        return json.dumps(content).encode()

    @classmethod
    def from_json(cls, content: bytes, url: str) -> Manifest:
        """Raises BatchError for what is no manifest, or another version's."""
        try:
            fields = json.loads(content)
            if fields["format"] != _FORMAT:
                raise BatchError(f"{url}: expected a job of format {_FORMAT}, got {fields['format']}; use --overwrite")
            return cls(
                files=tuple(InputFile(**file) for file in fields["files"]),
                options=fields["options"],
                parts=tuple(Part(index, *numbers) for index, numbers in enumerate(fields["parts"])),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise BatchError(f"{url}: it does not describe a job: {error!r}; use --overwrite") from None


def check_same_job(known: Manifest, asked: Manifest) -> None:
    """Raises BatchError, which names what differs, where going on would mix two jobs."""
    differences = [*_option_differences(known, asked), *_file_differences(known, asked)]
    if differences:
        shown = "; ".join(differences[:5]) + ("; ..." if len(differences) > 5 else "")
        raise BatchError(f"this is not the job that was begun: {shown}; use --overwrite to begin anew")


def _option_differences(known: Manifest, asked: Manifest) -> list[str]:
    before, now = known.options, json.loads(json.dumps(asked.options))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} was {json.dumps(before.get(name))}, got {json.dumps(now.get(name))}" for name in names]


def _file_differences(known: Manifest, asked: Manifest) -> list[str]:
    before, now = ({file.url: file for file in each.files} for each in (known, asked))
    gone = [f"{url} was in the input, and is not any more" for url in before if url not in now]
    new = [f"{url} is new in the input" for url in now if url not in before]
    changed = [f"{url} has changed" for url in before if url in now and before[url] != now[url]]
    return [*gone, *new, *changed]
