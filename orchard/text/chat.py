"""Chat messages become token ids here, and only here.

A chat template writes control tokens (`<|im_end|>`) and message text into one string. If that string were simply
tokenized, a user who types `<|im_end|>` would end their own turn. So it is never asked what the finished string spells,
but who wrote it:

1. Control tokens spelled out in the template's own source are replaced, before rendering, by *marks*: private-use
   characters that occur nowhere else. After rendering, a mark is a control token and everything else is text, which is
   encoded with control tokens off. For nearly all templates and messages that is the whole story.
2. Some templates put control tokens together (`'<|' + role + '|>'`). So, where the rest still spells one, the template
   is rendered again with the messages *disguised*: every character that begins or ends a control token is swapped for a
   private-use one. What is spelled now was put together by the template.
3. Unless the template wraps message text itself (`'<|' + name + '|>'`): rendered a third time with all characters of
   control tokens disguised, fewer are spelled. Such a template is refused.

A template may still look into messages (`'</think>' in content`) and finds what is there; only control-token texts in
messages it cannot find. A tokenizer without a template gets the plain format of `plain_prompt`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchard.core.errors import TemplateError, UsageError
from orchard.core.frozen import frozen
from orchard.text.control import ControlFinder
from orchard.text.messages import Message, messages_from
from orchard.text.templates import chat_variables, compile_template, render_compiled
from orchard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

# Blocks of private-use code points; the first half of a block is for marks, the second for disguises.
_BLOCK = 8192
_BLOCK_STARTS = (*range(0x100000, 0x10E000, _BLOCK), *range(0xF0000, 0xFE000, _BLOCK))
# Names that templates look up; the third rendering leaves them alone.
_STRUCTURE_WORDS = "type function name description parameters properties required enum items arguments id"
_STRUCTURE = frozenset(_STRUCTURE_WORDS.split())


@frozen
class MarkedTemplate:
    compiled: Template
    token_of: dict[str, int]  # mark → token id
    bos: str
    eos: str


def chat_ids(
    tokenizer: Tokenizer,
    messages: str | Sequence[Mapping[str, Any] | Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The conversation as token ids, ready for the model. `variables`: what else its template may ask for.

    Equal to `apply_chat_template` of the transformers package on conversations without control-token texts; with them, they
    stay text.
    """
    checked = messages_from(messages)
    if tokenizer.chat_template is None:
        return tokenizer.encode(plain_prompt(checked, add_generation_prompt), bos=tokenizer.add_bos)
    if tokenizer.frame is not None and add_generation_prompt and tools is None and not variables and _is_plain(checked):
        framed = tokenizer.frame.around(checked[0].content, tokenizer.control_finder)
        if framed is not None:
            return _ids(tokenizer, framed)
    return _ids(tokenizer, conversation_pieces(tokenizer, checked, add_generation_prompt, tools, variables))


def conversation_pieces(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[str | int]:
    """The conversation as its template renders it: texts and control-token ids, in order."""
    return _Rendering(
        tokenizer, chat_variables(messages, tools, add_generation_prompt, "", "", variables or {})
    ).pieces()


def _is_plain(messages: Sequence[Message]) -> bool:
    return len(messages) == 1 and messages[0] == Message("user", messages[0].content)


def plain_prompt(messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """For models without a template: `User: …`, `Assistant: …`, separated by blank lines."""
    turns = [f"{message.role.capitalize()}: {message.content}\n\n" for message in messages]
    return "".join(turns) + ("Assistant:" if add_generation_prompt else "")


class _Rendering:
    def __init__(self, tokenizer: Tokenizer, variables: dict[str, Any]) -> None:
        self.finder = tokenizer.control_finder
        self.block = _free_block(variables)
        source = tokenizer.chat_template or ""
        self.template = _marked_template(source, self.finder, self.block, tokenizer.bos_token, tokenizer.eos_token)
        self.variables = variables | {"bos_token": self.template.bos, "eos_token": self.template.eos}

    def pieces(self) -> list[str | int]:
        """Texts and control-token ids, in order."""
        text = self._render(lambda value: value)
        if not self._spelled(text):
            return self._split(text, [])
        edges, all_ = (
            self._disguise(characters) for characters in (self.finder.edge_characters, self.finder.characters)
        )
        disguised = self._render(lambda value: value.translate(edges))
        spelled = self._spelled(disguised)
        if not spelled:
            return self._split(text, [])
        neutral = Counter(found[2] for found in self._spelled(self._render(lambda value: value.translate(all_), True)))
        if Counter(found[2] for found in spelled) - neutral:
            raise TemplateError(
                "the chat template builds control tokens out of message text",
                hint="such a template lets a user forge turns; pass a template of your own",
            )
        revealed = disguised.translate({ord(new): chr(old) for old, new in edges.items()})
        # Characters were swapped one for one, so places agree unless the template looked at them. Then `text` cannot
        # be trusted to have the same parts, and the disguised rendering counts.
        return self._split(revealed, spelled)

    def _render(self, change: Callable[[str], str], keep_structure: bool = False) -> str:
        variables = self.variables | {
            "messages": [_changed_message(message, change, keep_structure) for message in self.variables["messages"]],
            "tools": _changed(self.variables["tools"], change, keep_structure),
        }
        return render_compiled(self.template.compiled, variables)

    def _disguise(self, characters: frozenset[str]) -> dict[int, str]:
        if len(characters) > _BLOCK // 2:
            raise TemplateError("the control tokens use too many characters", hint="the tokenizer looks damaged")
        start = self.block + _BLOCK // 2
        return {ord(character): chr(start + i) for i, character in enumerate(sorted(characters))}

    def _spelled(self, text: str) -> list[tuple[int, int, int]]:
        """Control tokens spelled in characters; marks are no characters of any token, so none spans them."""
        return [tuple(found) for found in self.finder.find(text)]  # type: ignore[misc]

    def _split(self, text: str, spelled: list[tuple[int, int, int]]) -> list[str | int]:
        token_of = self.template.token_of
        cuts = [(i, i + 1, token_of[c]) for i, c in enumerate(text) if c in token_of]
        pieces: list[str | int] = []
        at = 0
        for start, end, token_id in sorted(cuts + spelled):
            pieces += [text[at:start], token_id]
            at = end
        return [*pieces, text[at:]]


def _ids(tokenizer: Tokenizer, pieces: list[str | int]) -> list[int]:
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, int):
            ids.append(piece)
            continue
        before, after = pieces[i - 1] if i else None, pieces[i + 1] if i + 1 < len(pieces) else None
        # Some control tokens swallow the white space beside them.
        if isinstance(before, int) and tokenizer.added_tokens[before].rstrip:
            piece = piece.lstrip()
        if isinstance(after, int) and tokenizer.added_tokens[after].lstrip:
            piece = piece.rstrip()
        if piece:
            ids += tokenizer.encode_piece(piece, first=i == 0)
    return ids


@lru_cache(maxsize=32)
def _marked_template(source: str, finder: ControlFinder, block: int, bos: str, eos: str) -> MarkedTemplate:
    mark_of: dict[int, str] = {}

    def marker(text: str) -> str:
        if any(block <= ord(character) < block + _BLOCK for character in text):
            raise TemplateError("the chat template uses private-use characters", hint="pass a template of your own")
        return _marked(text, finder, mark_of, block)

    bos, eos = marker(bos), marker(eos)
    compiled = compile_template(source, marker=marker)
    return MarkedTemplate(compiled, {mark: token_id for token_id, mark in mark_of.items()}, bos, eos)


def _marked(text: str, finder: ControlFinder, mark_of: dict[int, str], block: int) -> str:
    out, at = [], 0
    for found in finder.find(text):
        if found.token_id not in mark_of:
            if len(mark_of) >= _BLOCK // 2:
                raise TemplateError("the chat template spells too many control tokens", hint="pass another template")
            mark_of[found.token_id] = chr(block + len(mark_of))
        out += [text[at : found.start], mark_of[found.token_id]]
        at = found.end
    return "".join([*out, text[at:]])


def _free_block(variables: dict[str, Any]) -> int:
    """A block of private-use characters that the messages do not touch."""
    taken: set[int] = set()

    def look(text: str) -> str:
        if not text.isascii():
            taken.update(ord(character) // _BLOCK * _BLOCK for character in text if character >= "\U000f0000")
        return text

    _changed([variables["messages"], variables["tools"]], look)
    for start in _BLOCK_STARTS:
        if start not in taken:
            return start
    raise UsageError("the messages use private-use characters from every range", hint="remove characters above U+F0000")


def _changed_message(message: dict[str, Any], change: Callable[[str], str], keep_structure: bool) -> dict[str, Any]:
    """Roles are ours (checked against a list), everything else is the user's."""
    return {key: value if key == "role" else _changed(value, change, keep_structure) for key, value in message.items()}


def _changed(value: Any, change: Callable[[str], str], keep_structure: bool = False) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change, keep_structure) for item in value]
    if isinstance(value, dict):
        return {
            key if keep_structure and key in _STRUCTURE else change(key): _changed(item, change, keep_structure)
            for key, item in value.items()
        }
    return value
