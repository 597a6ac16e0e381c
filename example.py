"""Text in, ranked items out: `python example.py` (or `make demo`), on the embedded model, with nothing downloaded."""

from prefixwise import Scorer

reviews = [
    "I loved every minute of it.",
    "The food was cold and the waiter was rude.",
    "Best purchase I have made this year!",
    "It broke after two days.",
    "Wonderful service, friendly people.",
    "A complete waste of money.",
]

with Scorer(dtype="float32") as scorer:  # the digits are the same on every CPU
    result = scorer.score(
        "Review: ",
        reviews,
        suffix=" Sentiment:",  # after every item, before the label
        labels=[" positive", " negative"],
        apply_softmax=True,
    )

for place, ranked in enumerate(result.ranked(), start=1):
    print(f"{place}. {ranked.score:.3f}  {ranked.item}")
