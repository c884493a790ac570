"""Prompts: what may be in one, and what is said before a model is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import OrchardError
from orchard.session.errors import FoundationModelsError, ImagePromptError, PromptError
from orchard.session.prompt import Attachment, ComposedPrompt, ImageAttachment, compose


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "cat.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    return path


def test_texts() -> None:
    assert compose("Hello").text == "Hello" and compose("Hello").attachments == ()
    assert compose(["One.", "Two."]).text == "One.\nTwo."
    assert compose(("One.",)).text == "One." and compose(part for part in ["a", "b"]).text == "a\nb"
    assert compose("a\x00b ❤").text == "a\x00b ❤"
    assert compose(["a", "b"]) == ComposedPrompt(["a", "b"]) != compose("a")


def test_images_for_a_model_that_sees(picture: Path) -> None:
    cat, dog = ImageAttachment(picture), ImageAttachment(path=picture, label="dog")
    composed = compose(["Compare:", cat, "and", dog], vision=True)
    assert composed.text == "Compare:\nand" and composed.attachments == (cat, dog)
    assert composed.parts == ["Compare:", cat, "and", dog]
    assert compose(cat, vision=True).attachments == (cat,) and compose([cat], vision=True).text == ""
    assert (dog.path, dog.label, cat.label) == (picture, "dog", None) and "dog" in repr(dog)


def test_images_for_a_model_of_text(picture: Path) -> None:
    for prompt in (ImageAttachment(picture), ["What is this?", ImageAttachment(picture)]):
        with pytest.raises(ImagePromptError, match="reads text only") as caught:
            compose(prompt)  # type: ignore[arg-type]
        assert caught.value.hint


@pytest.mark.parametrize("prompt", ["", " \n\t", [], [""], ["", "  "], ()])
def test_empty_prompts(prompt: Any) -> None:
    with pytest.raises(PromptError, match="empty") as caught:
        compose(prompt)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (5, "int"),
        (None, "NoneType"),
        (b"Hello", "bytes"),
        ({"role": "user"}, "dict"),
        (["a", 5], "int"),
        (["a", ["b"]], "list"),
        ([Path("cat.png")], "Path"),
    ],
)
def test_parts_that_no_model_reads(prompt: Any, kind: str) -> None:
    with pytest.raises(PromptError, match=f"cannot hold a .*{kind}"):
        compose(prompt)


def test_text_that_is_none() -> None:
    with pytest.raises(PromptError, match="Unicode"):
        compose(["fine", "\ud83d"])


def test_attachments_are_checked_when_made(tmp_path: Path, picture: Path) -> None:
    with pytest.raises(ImagePromptError, match="no image file") as caught:
        ImageAttachment(tmp_path / "none.png")
    assert "none.png" in str(caught.value) and caught.value.hint
    with pytest.raises(ImagePromptError) as caught:
        ImageAttachment(tmp_path)
    assert "folder" in caught.value.hint
    with pytest.raises(ImagePromptError, match="is a Path and not a str") as caught:
        ImageAttachment(str(picture))  # type: ignore[arg-type]
    assert "Path(" in caught.value.hint
    with pytest.raises(ImagePromptError, match="label"):
        ImageAttachment(picture, label=5)  # type: ignore[arg-type]
    for name in ("a\x00b", "x" * 5000):
        with pytest.raises(ImagePromptError):
            ImageAttachment(Path(name))


def test_an_image_that_went_away(picture: Path) -> None:
    image = ImageAttachment(picture)
    picture.unlink()
    with pytest.raises(ImagePromptError, match="no longer there"):
        compose(image, vision=True)


def test_errors_are_prompt_errors_and_none_of_the_generation() -> None:
    """As in the SDK: whoever catches generation errors does not catch these."""
    assert issubclass(ImagePromptError, PromptError) and issubclass(PromptError, OrchardError)
    assert not issubclass(PromptError, FoundationModelsError)


def test_attachments_of_ones_own() -> None:
    class Note(Attachment):
        def add_to_composed_prompt(self, composed_prompt: ComposedPrompt) -> None:
            composed_prompt.add("(a note)")

    class Sound(Attachment):
        def add_to_composed_prompt(self, composed_prompt: ComposedPrompt) -> None:
            composed_prompt.parts.append(self)

    assert compose(["Read:", Note()]).text == "Read:\n(a note)"
    with pytest.raises(PromptError, match="text only") as caught:
        compose(["Listen:", Sound()])
    assert not isinstance(caught.value, ImagePromptError)
    with pytest.raises(TypeError, match="abstract"):
        Attachment()  # type: ignore[abstract]
