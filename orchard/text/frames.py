"""What a chat template puts around one user message, worked out once, so that a plain question needs no template engine.

Jinja and its sandbox take noticeable time between start and first token. Most templates copy the text of a
message as it is; for those, whatever surrounds the text is always the same. That a template does so is not guessed from
examples but read from its syntax: `copies_content` accepts only what cannot look into a message's text. A frame stands in
for the first step of `orchard.text.chat` and nothing else: text that spells a control token goes the whole way, as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchard.core.errors import OrchardError
from orchard.core.frozen import frozen

if TYPE_CHECKING:
    from jinja2 import nodes

    from orchard.text.control import ControlFinder
    from orchard.text.tokenizer import Tokenizer

Pieces = tuple[str | int, ...]
LONGEST = 100_000
"""Characters of a message; longer ones meet the limits of the template engine."""
_LONGEST_TEMPLATE = 20_000
_HOLE = "\ue000"
_PRIVATE = "\U000f0000"
_LOOP = frozenset(["first", "last", "index", "index0", "revindex", "revindex0", "length"])
_NAMES = frozenset(["messages", "loop", "add_generation_prompt", "bos_token", "eos_token", "tools"])
_KINDS = frozenset(["Template", "Output", "TemplateData", "Const", "Name", "Getitem", "Getattr", "Add", "Concat"])
_KINDS |= {"For", "If", "Compare", "Operand", "And", "Or", "Not"}


@frozen
class Frame:
    """Texts and control tokens before and after the text that holds the message, and what is around the message in it."""

    before: Pieces
    head: str
    tail: str
    after: Pieces

    def around(self, content: str, finder: ControlFinder) -> list[str | int] | None:
        """The pieces of a conversation of one user message; None where the template itself has to be asked."""
        text = f"{self.head}{content}{self.tail}"
        if len(content) > LONGEST or max(content, default="") >= _PRIVATE or finder.find(text):
            return None
        return [*self.before, text, *self.after]

    def to_list(self) -> list[Any]:
        return [list(self.before), self.head, self.tail, list(self.after)]

    @classmethod
    def from_list(cls, parts: Any) -> Frame:
        before, head, tail, after = parts
        pieces = [*before, *after]
        if (
            not all(type(part) in (str, int) for part in pieces)
            or not isinstance(head, str)
            or not isinstance(tail, str)
        ):
            raise ValueError("a frame is made of texts and token ids")
        return cls(tuple(before), head, tail, tuple(after))


def frame_of(tokenizer: Tokenizer) -> Frame | None:
    """The frame of a tokenizer's template; None where it has none, or may look into messages."""
    from orchard.text.chat import conversation_pieces
    from orchard.text.messages import Message

    try:
        if tokenizer.chat_template is None or not copies_content(tokenizer.chat_template):
            return None
        pieces = conversation_pieces(tokenizer, [Message("user", _HOLE)])
    except OrchardError:  # a template that refuses: whoever uses it is to hear that
        return None
    places = [i for i, piece in enumerate(pieces) if isinstance(piece, str) and _HOLE in piece]
    if len(places) != 1 or str(pieces[places[0]]).count(_HOLE) != 1:
        return None
    head, tail = str(pieces[places[0]]).split(_HOLE)
    return Frame(tuple(pieces[: places[0]]), head, tail, tuple(pieces[places[0] + 1 :]))


def copies_content(source: str) -> bool:
    """Whether a template does nothing with the text of messages but write it, as far as its syntax shows."""
    from orchard.text.sandbox import TemplateSandbox
    from orchard.text.templates import template_errors

    if len(source) > _LONGEST_TEMPLATE:
        return False
    with template_errors():
        return _Reader().accepts(TemplateSandbox().parse(source))


class _Reader:
    """Walks a template's tree with the way down to each node, and accepts only what is listed here."""

    def __init__(self) -> None:
        self.targets: set[str] = set()

    def accepts(self, tree: nodes.Template) -> bool:
        from jinja2 import nodes

        for loop in tree.find_all(nodes.For):
            target, over = loop.target, loop.iter
            if not isinstance(target, nodes.Name) or target.name in _NAMES or loop.recursive or loop.test is not None:
                return False
            if not isinstance(over, nodes.Name) or over.name != "messages":
                return False
            self.targets.add(target.name)
        return self._accepts(tree, ())

    def _accepts(self, node: nodes.Node, above: tuple[nodes.Node, ...]) -> bool:
        kind = type(node).__name__
        if kind not in _KINDS:
            return False
        if kind == "Name" and not self._name(node, above):
            return False
        if kind in ("Getitem", "Getattr") and not self._part(node, above):
            return False
        return all(self._accepts(child, (*above, node)) for child in node.iter_child_nodes())

    def _name(self, node: Any, above: tuple[nodes.Node, ...]) -> bool:
        """`messages` and a message are never used whole, but for the loop over messages."""
        parent = above[-1]
        if node.name not in _NAMES and node.name not in self.targets:
            return False
        if type(parent).__name__ == "For":
            return True
        if node.name in ("messages", "loop") or node.name in self.targets:
            return type(parent).__name__ in ("Getitem", "Getattr")
        return True

    def _part(self, node: Any, above: tuple[nodes.Node, ...]) -> bool:
        key = node.attr if type(node).__name__ == "Getattr" else getattr(node.arg, "value", None)
        owner = node.node
        if getattr(owner, "name", None) == "loop":
            return key in _LOOP
        if getattr(owner, "name", None) == "messages":  # one message, of which a part is taken
            return type(key) is int and type(above[-1]).__name__ in ("Getitem", "Getattr")
        if not isinstance(key, str) or not self._is_message(owner):
            return False
        return key == "role" or (key == "content" and self._is_written(above))

    def _is_message(self, node: Any) -> bool:
        named = getattr(node, "name", None) in self.targets
        return named or getattr(getattr(node, "node", None), "name", None) == "messages"

    def _is_written(self, above: tuple[nodes.Node, ...]) -> bool:
        """Whether what stands here goes into the text as it is: joined with others, and written."""
        for parent in reversed(above):
            if type(parent).__name__ == "Output":
                return True
            if type(parent).__name__ not in ("Add", "Concat"):
                return False
        return False
