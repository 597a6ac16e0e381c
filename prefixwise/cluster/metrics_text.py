"""The figures of many replicas as one Prometheus page: every sample gets a label that says whose it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<rest>.+)")
_LABEL = "replica"


def merge_metrics(pages: Mapping[str, str]) -> str:
    """By family, in the order of the first page, each family's HELP and TYPE once."""
    families: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                families.setdefault(family, []).append(_labelled(line, replica))
    lines = [line for family in heads for line in (*heads[family], *families.get(family, ()))]
    return "\n".join(lines) + "\n"


def _labelled(sample: str, replica: str) -> str:
    found = _SAMPLE.fullmatch(sample)
    if found is None:
        return sample
    own = f'{_LABEL}="{replica}"'
    labels = f"{own},{found['labels']}" if found["labels"] else own
    return f"{found['name']}{{{labels}}} {found['rest']}"
