"""How well the words on a page can be told from what is behind them, by the formula of WCAG 2.2 (relative luminance and
contrast ratio, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio)."""

from __future__ import annotations

from typing import Any

from tests.serve.browser.devtools import Page

# For every piece of text that is shown: its colour, the colours behind it from the inside out, and which text it is.
COLLECT = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const words = walker.currentNode.textContent.trim();
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (!words || !element.checkVisibility({ visibilityProperty: true }) || box.width < 2 || style.clipPath !== "none") continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.push(numbers(getComputedStyle(at).backgroundColor));
    const where = `${element.localName}.${element.className}: ${words.slice(0, 60)}`;
    found.push({ colour: numbers(style.color), behind, where });
  }
  return found;
})()
"""


def worst_contrast(page: Page) -> tuple[float, str]:
    """The lowest ratio of any text that is shown, and which text that is."""
    found = page.js(COLLECT)
    assert len(found) > 10
    return min((_ratio(one["colour"], _ground(one["behind"])), one["where"]) for one in found)


def _ground(behind: list[list[float]]) -> list[float]:
    """The colour that the layers give together, the innermost first."""
    ground = [255.0, 255.0, 255.0]
    for red, green, blue, *alpha in reversed(behind):
        share = alpha[0] if alpha else 1.0
        ground = [share * new + (1 - share) * old for new, old in zip((red, green, blue), ground)]
    return ground


def _ratio(one: list[Any], other: list[Any]) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: list[Any]) -> float:
    parts = [part / 255 for part in colour[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
