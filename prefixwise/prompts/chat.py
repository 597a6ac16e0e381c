"""From the messages of a chat to the text before its answer, by the checkpoint's chat template.

    messages with {item}    before | item | after      both texts are rendered once for all items
    messages without it     before                     the whole chat

The answer follows the text. If the assistant has the last message, the answer continues that message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, TokenizerError
from prefixwise.contract.inputs import Place
from prefixwise.contract.judge import ITEM, Message
from prefixwise.contract.ragged import Int32Array
from prefixwise.models.chat_template import ChatTemplateError
from prefixwise.prompts.chat_places import BLANK, chat_variables, place_of, render
from prefixwise.prompts.tokenizer import TextTokenizer

_PLACE, _END = place_of("item"), place_of("end")


@dataclass(frozen=True)
class ChatText:
    """The text of a chat up to its answer."""

    before: str  # the item
    after: str = ""  # the item, up to the answer
    strips_left: bool = False  # the template strips blanks at the beginning of items
    strips_right: bool = False

    def stripped(self, item: str) -> str:
        """The item as the template writes it. (Behind a blank item it would strip the end of `before`, too.)"""
        item = item.lstrip() if self.strips_left else item
        return item.rstrip() if self.strips_right else item


def chat_text(messages: Sequence[Message], tokenizer: TextTokenizer | None) -> ChatText:
    """Renders the messages. Raises RequestError if the model's template does not take them, or TokenizerError."""
    tokenizer, template = _check_chat(messages, tokenizer)
    text = _rendered(tuple(messages), tokenizer, template)
    before, *rest = text.split(_PLACE)
    if not rest:
        return ChatText(before)
    return ChatText(
        before=before.removesuffix(BLANK),
        after=rest[0].removeprefix(BLANK),
        strips_left=not before.endswith(BLANK),
        strips_right=not rest[0].startswith(BLANK),
    )


def _check_chat(messages: Sequence[Message], tokenizer: TextTokenizer | None) -> tuple[TextTokenizer, str]:
    """The tokenizer and its chat template. Raises RequestError, TokenizerError."""
    if tokenizer is None:
        raise TokenizerError("this model has no tokenizer, so messages cannot be read; send token ids to /v1/score")
    if tokenizer.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template, so messages cannot be rendered: expected a model that was trained to "
            "chat; send the whole prompt to /v1/score (query, items, suffix, labels)",
            code="no_chat_template",
            param="messages",
        )
    for index, message in enumerate(messages):
        tokenizer.check_len(message.content, Place(f"messages[{index}].content", "messages"))
    return tokenizer, tokenizer.chat_template


def chat_prompt(messages: Sequence[Message], tokenizer: TextTokenizer | None) -> Int32Array:
    """The tokens of a chat up to its answer; `{item}` has no meaning in it. Raises as `chat_text`."""
    tokenizer, template = _check_chat(messages, tokenizer)
    return tokenizer.encode(_rendered(tuple(messages), tokenizer, template, has_item=False))


def _rendered(messages: tuple[Message, ...], tokenizer: TextTokenizer, template: str, *, has_item: bool = True) -> str:
    """The text with the placeholder in the place of the item. Raises invalid_messages."""
    place = BLANK + _PLACE + BLANK if has_item else ITEM
    *earlier, last = ((each.role, each.content.replace(ITEM, place)) for each in messages)
    is_continued = last[0] == "assistant"
    if is_continued:
        last = (last[0], last[1] + _END)
    variables = chat_variables(tokenizer.special_tokens, (*earlier, last), add_generation_prompt=not is_continued)
    try:
        text = render(template, variables)
    except ChatTemplateError as error:
        raise _refused(f"fails: {error}") from None
    if is_continued and _END not in text:
        raise _refused("leaves the last message out")
    num_places = sum(each.content.count(ITEM) for each in messages) * has_item
    if text.count(_PLACE) != num_places:
        raise _refused(f"must show {ITEM} once, and shows it {text.count(_PLACE)} times")
    return text.partition(_END)[0] if is_continued else text


def _refused(why: str) -> InvalidValueError:
    message = f"messages must be a chat that the model's chat template takes: the template {why}"
    return InvalidValueError(message, code="invalid_messages", param="messages")
