"""What people do on the playground, as one call each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

ITEMS = ["a pizza with mushrooms", "the law of income taxes", "freshly baked bread"]
LABELS = " yes\n no"


def fill_in(page: Page, items: list[str] = ITEMS, labels: str = LABELS, query: str = "Is this food? Text: ") -> None:
    page.get_by_label("Score as I type", exact=True).uncheck()
    page.locator("#more").evaluate("each => { each.open = true; }")
    page.get_by_label("Query", exact=True).fill(query)
    page.get_by_label("Items", exact=True).fill("\n".join(items))
    page.get_by_label("Labels", exact=True).fill(labels)
    page.get_by_label("Text after every item", exact=True).fill("\nAnswer:")


def score(page: Page) -> None:
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector("#list:not([aria-busy])", state="attached")


def rows(page: Page) -> list[str]:
    return page.locator("[role=option] .text").all_inner_texts()


def paste(page: Page, text: str) -> None:
    page.get_by_label("Items", exact=True).evaluate(
        """(field, text) => {
          const data = new DataTransfer();
          data.setData("text/plain", text);
          field.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
        }""",
        text,
    )


def drop(page: Page, selector: str, name: str, text: str) -> None:
    page.locator(selector).evaluate(
        """(target, {name, text}) => {
          const data = new DataTransfer();
          data.items.add(new File([text], name));
          target.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
        }""",
        {"name": name, "text": text},
    )


def lines(page: Page) -> list[str]:
    return page.get_by_label("Items", exact=True).input_value().split("\n")


def tab_to(page: Page, wanted: str) -> None:
    """Press Tab until that one has the focus; wherever the focus is, it can be seen."""
    for _ in range(40):
        page.keyboard.press("Tab")
        found, outline = page.evaluate(
            """() => {
              const focused = document.activeElement;
              const shown = focused.type === "file" ? focused.parentElement.querySelector("label") : focused;
              return [focused.id, getComputedStyle(shown).outlineStyle];
            }"""
        )
        assert outline != "none", f"nobody sees that {found} has the focus"
        if found == wanted:
            return
    raise AssertionError(f"Tab does not lead to {wanted}")
