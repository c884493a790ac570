"""Prompts: a text, an attachment, or a list of both, put together for a model.

Composing is where a prompt is checked: an empty one, a part of a type that no model reads, or an image for a model that sees
none raise here, before anything is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchard.session.errors import ImagePromptError, PromptError


class ComposedPrompt:
    """The parts of a prompt in their order. `text` is all that is text, one part a line."""

    def __init__(self, parts: Iterable[str | Attachment] = ()) -> None:
        self.parts: list[str | Attachment] = []
        for part in parts:
            self.add(part)

    def add(self, part: str | Attachment) -> None:
        if isinstance(part, str):
            self.parts.append(_unicode(part))
        elif isinstance(part, Attachment):
            part.add_to_composed_prompt(self)
        else:
            raise PromptError(
                f"a prompt cannot hold a {type(part).__name__}",
                hint="give a text, an ImageAttachment, or a list of these",
            )

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return tuple(part for part in self.parts if isinstance(part, Attachment))

    def __eq__(self, other: object) -> bool:
        return self.parts == other.parts if isinstance(other, ComposedPrompt) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ComposedPrompt({self.parts!r})"


class Attachment(ABC):
    """Something in a prompt that is not text. `label` is the name by which the model and its tools may speak of it."""

    label: str | None = None

    @abstractmethod
    def add_to_composed_prompt(self, composed_prompt: ComposedPrompt) -> None:
        """Append this to the parts of a prompt, or raise `PromptError`."""


class ImageAttachment(Attachment):
    """An image in a file, which must be there already."""

    def __init__(self, path: Path, label: str | None = None) -> None:
        if not isinstance(path, Path):
            hint = f"write ImageAttachment(Path({path!r}))" if isinstance(path, str) else "give a pathlib.Path"
            raise ImagePromptError(f"an image's path is a Path and not a {type(path).__name__}", hint=hint)
        if not isinstance(label, str | None):
            raise ImagePromptError(f"the label of {path} is a {type(label).__name__}", hint="a label is text, or None")
        if not _is_file(path):
            hint = "it is a folder; give a file" if _is_folder(path) else "check the path; relative ones start here"
            raise ImagePromptError(f"there is no image file at {path}", hint=hint)
        self.path = path
        self.label = label

    def add_to_composed_prompt(self, composed_prompt: ComposedPrompt) -> None:
        if not _is_file(self.path):
            raise ImagePromptError(f"the image {self.path} is no longer there", hint="attach it again")
        composed_prompt.parts.append(self)

    def __repr__(self) -> str:
        return f"ImageAttachment({str(self.path)!r}{f', label={self.label!r}' if self.label is not None else ''})"


PromptComponent = str | Attachment
Prompt = PromptComponent | list[PromptComponent]


def compose(prompt: Prompt | Iterable[PromptComponent], *, vision: bool = False) -> ComposedPrompt:
    """A prompt put together for a model that sees images (`vision`) or does not."""
    parts: Any = prompt
    if not isinstance(parts, Iterable) or isinstance(parts, str | Attachment | bytes | Mapping):
        parts = [parts]
    composed = ComposedPrompt(parts)
    if composed.attachments and not vision:
        first = composed.attachments[0]
        kind = ImagePromptError if isinstance(first, ImageAttachment) else PromptError
        raise kind(f"this model reads text only and cannot be given {first!r}", hint="describe it in words instead")
    if not composed.attachments and not composed.text.strip():
        raise PromptError("the prompt is empty", hint="give a text with at least one letter")
    return composed


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(
            "the prompt holds characters that are not valid Unicode text",
            hint='read it again from its bytes, for example with data.decode("utf-8", "replace")',
        ) from None
    return text


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no system allows
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
