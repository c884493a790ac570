"""Text to token ids and back. Wraps the `tokenizers` package and adds the one rule that matters for safety:
text is encoded with control tokens *off* unless the caller says otherwise, so that what a user types can never end a
turn or begin a system message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import UsageError
from orchard.text.control import ControlFinder
from orchard.text.frames import Frame
from orchard.text.loaded import Loaded, guarded
from orchard.text.spelling import Spelling, spelling_of

if TYPE_CHECKING:
    from orchard.text.merges import Merges

_MOST = 2**32
"""No id is larger: the `tokenizers` package counts in 32 bits."""


class Tokenizer:
    """Build with `from_file` or `from_gguf`."""

    def __init__(self, loaded: Loaded, merges: Merges | None = None) -> None:
        """`merges`, where there are any, do the common work, and the backend is made when something else is asked for."""
        self._loaded = loaded
        self._merges = merges
        self.vocab_size = loaded.vocab_size
        self.control_ids = loaded.control_ids
        self.bos_id = loaded.bos_id
        self.eos_id = loaded.eos_id
        self.eos_ids = loaded.eos_ids
        self.add_bos = loaded.add_bos
        self.chat_template = loaded.chat_template
        self.frame: Frame | None = None  # known for a tokenizer that was packed; see orchard.text.frames

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        config: Mapping[str, Any] | None = None,
        special_map: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """From tokenizer.json; the others are the parsed tokenizer_config, special_tokens_map, generation_config."""
        from orchard.text.from_file import load_file

        return cls(load_file(Path(path), config, special_map, generation_config))

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        config: Mapping[str, Any] | None = None,
        special_map: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """The same from the bytes of tokenizer.json."""
        from orchard.text.from_file import load_bytes

        return cls(load_bytes(data, config, special_map, generation_config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        from orchard.text.from_gguf import load_gguf

        return cls(load_gguf(metadata))

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """`special=False`: text that spells a control token is ordinary text. `bos` puts the begin token first, if
        there is one and it is not there already."""
        ids = _ids(self._marked, text) if special else self._safe(text)
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_piece(self, text: str, *, first: bool) -> list[int]:
        """Encode a stretch of text between control tokens. Some tokenizers put a space before the very first word of
        a text only, so a later stretch is encoded differently."""
        return self.encode(text) if first else self._safe(text, later=True)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        ids = list(ids)
        if self._merges is not None and all(type(i) is int and 0 <= i < _MOST for i in ids):
            return self._merges.decode(ids, skip_special)
        try:
            return self._marked.decode(ids, skip_special_tokens=skip_special)
        except (OverflowError, TypeError) as error:
            raise UsageError(f"not a list of token ids: {error}", hint="ids are whole numbers from 0") from error

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a control token gives its own text, an id without a token nothing."""
        text = self.token_text(token_id)
        if text is None:
            return b""
        if self.spelling.kind == "other" and token_id not in self.skipped_ids:
            return self.decode([token_id]).encode()
        return text.encode() if token_id in self.skipped_ids else self.spelling.bytes_of(text)

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary entry as it is spelled in the file."""
        if self._merges is not None and type(token_id) is int and 0 <= token_id < _MOST:
            return self._merges.token_text(token_id)
        try:
            return self._marked.id_to_token(token_id)
        except (OverflowError, TypeError) as error:
            raise UsageError(f"{token_id!r} is not a token id", hint="ids are whole numbers from 0") from error

    def to_json(self) -> str:
        """A tokenizer.json for the `tokenizers` and `transformers` packages."""
        return self._marked.to_str(pretty=False)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        return {self.token_text(i): i for i in sorted(self.control_ids)}  # type: ignore[misc]

    @cached_property
    def control_finder(self) -> ControlFinder:
        return ControlFinder(self.control_tokens)

    @cached_property
    def added_tokens(self) -> dict[int, Any]:
        """id → `tokenizers.AddedToken`, or the same facts, for every entry that is matched whole in the text."""
        return dict(self._merges.added if self._merges is not None else self._marked.get_added_tokens_decoder())

    @cached_property
    def skipped_ids(self) -> frozenset[int]:
        """What `decode` leaves out: control tokens, and "unknown" where the file calls it special."""
        return frozenset(i for i, token in self.added_tokens.items() if token.special)

    @cached_property
    def spelling(self) -> Spelling:
        return Spelling("byte-level") if self._merges is not None else spelling_of(self._marked.decoder)

    @cached_property
    def template_hash(self) -> str | None:
        import hashlib  # here, because it brings OpenSSL: megabytes that an answer does not need

        return hashlib.sha256(self.chat_template.encode()).hexdigest() if self.chat_template else None

    @property
    def bos_token(self) -> str:
        return "" if self.bos_id is None else self.token_text(self.bos_id) or ""

    @property
    def eos_token(self) -> str:
        return "" if self.eos_id is None else self.token_text(self.eos_id) or ""

    def _safe(self, text: str, later: bool = False) -> list[int]:
        ids = self._merges.encode(text) if self._merges is not None and isinstance(text, str) else None
        if ids is None:
            ids = _ids(self._later if later else self._plain, text)
        if not self.control_ids.isdisjoint(ids):
            # Possible only where the vocabulary itself leads there: a merge that ends in a control token, a whole
            # word that is one, or an unknown character. The strict twin cannot spell control tokens at all.
            ids = [i for i in _ids(self._strict, text) if i not in self.control_ids]
        return ids

    @cached_property
    def _marked(self) -> Any:
        """The backend that recognises control tokens in text."""
        backend = self._loaded.backend
        return backend() if callable(backend) else backend

    @cached_property
    def _plain(self) -> Any:
        return _without_control(self._marked)

    @cached_property
    def _later(self) -> Any:
        """The plain tokenizer without the space that goes before the first word only."""
        pre_tokenizer = self._plain.pre_tokenizer
        if pre_tokenizer is None or b'"prepend_scheme":"first"' not in bytes(pre_tokenizer.__getstate__()):
            return self._plain
        tree = json.loads(self.to_json())
        steps = tree["pre_tokenizer"].get("pretokenizers", [tree["pre_tokenizer"]])
        for step in steps:
            if step.get("prepend_scheme") == "first":
                step["prepend_scheme"] = "never"
        return _rebuilt(tree)

    @cached_property
    def _strict(self) -> Any:
        """A twin in which every control token has a name that no text can spell."""
        tree = json.loads(self.to_json())
        hidden = {text: f"\ufdd0{i}\ufdd0" for text, i in self.control_tokens.items()}
        tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] not in hidden]
        tree["post_processor"] = None
        model = tree["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {hidden.get(text, text): i for text, i in vocab.items()}
        else:
            model["vocab"] = [[hidden.get(text, text), score] for text, score in vocab]
        if model.get("unk_token") in hidden:
            model["unk_token"] = hidden[model["unk_token"]]
        if "merges" in model:
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [p for p in pairs if hidden.keys().isdisjoint((p[0], p[1], p[0] + p[1]))]
        return _rebuilt(tree)


def _ids(backend: Any, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            "the text holds characters that are not valid Unicode", hint="pass text decoded as UTF-8"
        ) from None
    except AttributeError:
        raise UsageError(f"cannot encode {type(text).__name__}", hint="pass a text") from None
    return backend.encode(text, add_special_tokens=False).ids


def _without_control(backend: Any) -> Any:
    """A second tokenizer over the same vocabulary (shared, not copied) that ignores control tokens in text.

    Two objects instead of one switched to and fro, so that threads do not disturb each other.
    """
    from tokenizers import Tokenizer as Backend

    twin = Backend(backend.model)
    twin.normalizer, twin.pre_tokenizer, twin.decoder = backend.normalizer, backend.pre_tokenizer, backend.decoder
    added = backend.get_added_tokens_decoder()
    # In order of id (a token outside the vocabulary gets the next free id), in as few calls as that allows: each call
    # rebuilds the matcher.
    ordered = [token for _, token in sorted(added.items())]
    for special, run in groupby(ordered, key=lambda token: token.special):
        (twin.add_special_tokens if special else twin.add_tokens)(list(run))
    if twin.get_added_tokens_decoder().keys() != added.keys():
        twin = Backend.from_str(backend.to_str())  # ids with gaps: only the file form can express them
    twin.encode_special_tokens = True
    return twin


def _rebuilt(tree: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer as Backend

    backend = guarded("cannot rebuild the tokenizer", lambda: Backend.from_str(json.dumps(tree)))
    backend.encode_special_tokens = True
    return backend
