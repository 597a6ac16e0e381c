"""The result of `bench ab` for people: rows of text, and a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable

from prefixwise.bench.artifacts import AbResult, AbVariant, SpeedRatio

HEADERS = ("variant", "time ms", "p95 ms", "items/s", "speed", "95 % interval", "max diff", "mean diff", "scores")
_FEW_ROUNDS = 5


def cells_of(variant: AbVariant) -> tuple[str, ...]:
    """One row, in the order of HEADERS."""
    speed, scores = variant.speed_vs_first, variant.scores_vs_first
    return (
        variant.name,
        _number(variant.median_ms if variant.time_ms is None else variant.time_ms),
        _number(variant.p95_ms),
        _number(variant.items_per_sec),
        "-" if speed is None else f"{speed.ratio:.3f}x",
        _interval(speed),
        "-" if scores is None else f"{scores.max_abs_diff:.2e}",
        "-" if scores is None else f"{scores.mean_abs_diff:.2e}",
        _verdict(variant),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _interval(speed: SpeedRatio | None) -> str:
    return "-" if speed is None or speed.low is None or speed.high is None else f"{speed.low:.3f} to {speed.high:.3f}"


def _verdict(variant: AbVariant) -> str:
    if variant.status == "failed":
        return "failed"
    return "agree" if variant.scores_agree else "DIFFER"


def notes_of(rounds: int, planned: int) -> list[str]:
    """What a reader of the figures should know."""
    notes = [f"cut short: {rounds} of {planned} rounds were finished"] if rounds < planned else []
    if 1 < rounds < _FEW_ROUNDS:
        notes.append(f"{rounds} rounds make a wide interval: --rounds 10 or more narrow it")
    return notes


def problems_of(result: AbResult) -> list[str]:
    """A line for every variant that failed, or whose scores are not the first one's."""
    limits = result.correctness_thresholds
    lines = []
    for variant in result.variants:
        if variant.failure is not None:
            lines.append(f"{variant.name} failed: {variant.failure}")
        elif not variant.scores_agree and variant.scores_vs_first is not None:
            got = variant.scores_vs_first
            lines.append(
                f"the scores of {variant.name} are not those of {result.variants[0].name}: expected max <= "
                f"{limits.max_abs_diff:g} and mean <= {limits.mean_abs_diff:g}, "
                f"got {got.max_abs_diff:g} and {got.mean_abs_diff:g}"
            )
    return lines


def markdown_of(result: AbResult) -> str:
    """A page with one table."""
    shape, first = result.geometry, result.variants[0]
    device = first.server_config.get("devices", {})
    lines = [
        f"# {result.compare}: {' vs '.join(variant.name for variant in result.variants)}",
        "",
        f"- model: {result.model or 'embedded'}",
        f"- device: {device.get('device', '-')} ({device.get('kind', '-')}), {device.get('dtype', '-')}",
        f"- requests: {shape.query_tokens} query tokens, {shape.num_items} items of {shape.item_tokens}; "
        + ("one query, its prefix kept" if result.cached else "another query in every run"),
        f"- rounds: {result.rounds}, in turns; runs of a variant in a round: {result.runs_per_round}",
        f"- made: {result.generated_at_utc}",
        "",
        _row(HEADERS),
        _row("---" for _ in HEADERS),
        *(_row(cells_of(variant)) for variant in result.variants),
        "",
        "A time is the geometric mean of the rounds' medians; the p95 is of all runs. Speed is the time of "
        f"{first.name} over the variant's; its interval is Student's, paired by round.",
        *(f"\nNote: {note}." for note in result.notes),
        *(f"\n**{problem}**" for problem in problems_of(result)),
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
