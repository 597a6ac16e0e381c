"""The profile of a reranker that sentence-transformers has saved: its chat template and the tokens of its LogitScore.

The template gets messages with the roles `query` and `document`, and an instruction as `system`. The whole prompt is
one text, of which only the document may be cut.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from prefixwise.contract.errors import TokenizerError
from prefixwise.models.checkpoint import LogitScore
from prefixwise.prompts.chat_places import RenderedPlaces, place_of, render_places
from prefixwise.prompts.profile import Piece, Profile
from prefixwise.prompts.tokenizer import TextTokenizer

log = logging.getLogger("prefixwise")

NAME = "sentence-transformers"
_PAIR = (("query", "query"), ("document", "document"))


def profile_of_cross_encoder(score: LogitScore, tokenizer: TextTokenizer) -> Profile | None:
    """None if the chat template does not show a query and a document once each; the log says why."""
    try:
        plain = render_places(tokenizer, _PAIR, score.template_variables)
    except TokenizerError as error:
        log.warning("the model's folder says how it scores, and cannot be followed: %s", error)
        return None
    asked = None
    with suppress(TokenizerError):  # a template without a place for an instruction
        asked = render_places(tokenizer, (("system", "instruction"), *_PAIR), score.template_variables)
    (lead, after), (asked_lead, asked_after) = _halves(plain), _halves(asked or plain)
    ids = (score.true_token_id, score.false_token_id)
    return Profile(
        name=NAME,
        description="a reranker of sentence-transformers: its own chat template and LogitScore",
        relevance="logit" if score.false_token_id is None else "logit_diff",
        labels=(),
        label_token_ids=tuple(each for each in ids if each is not None),
        before=(),
        body=(Piece(asked_lead + "{document}", lead + "{document}"),),
        after=(Piece(asked_after, after),),
        joint=bool(after),
        strip="document" in plain.stripped,
        instruction=score.instruction if asked is not None else None,
    )


def _halves(rendered: RenderedPlaces) -> tuple[str, str]:
    """The text before the document and after it, as a profile writes them."""

    def template(text: str) -> str:
        text = text.replace("{", "{{").replace("}", "}}")
        for name in ("query", "instruction"):
            text = text.replace(place_of(name), f"{{{name}}}")
        return text

    lead, after = rendered.split("document")
    return template(lead), template(after)
