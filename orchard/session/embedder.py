"""Texts to vectors: an embedding model with its tokenizer, behind one verb.

embedder = orchard.embedder("minilm")
vectors = embedder.embed(["A cat sleeps.", "A dog barks."]).vectors

Vectors have length 1, so their dot product is their cosine. A text's vector does not depend on what is embedded beside it
(beyond the rounding of float32). Nothing is cut unless the caller says so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import BadFile, Cancelled, ContextOverflow, MissingTokenizer, UsageError
from orchard.session.assets import refuse_if_forbidden
from orchard.session.place import device_of, may_have_cuda
from orchard.text.loaded import guarded
from orchard.text.tokenizer import Tokenizer
from orchard.weights.library import Library
from orchard.weights.sentence import Sentence

if TYPE_CHECKING:
    from orchard.models.language.encoder import Encoder
    from orchard.weights.folder import HFFolder

Input = str | Sequence[int]
"""A text, or the ids of its tokens."""
BATCH_TOKENS = 2048
"""Tokens of one call of the model, padding included: what bounds the memory of a call, however many texts there are."""
CALL_TOKENS = 32
"""A call costs about as much as so many tokens: less padding than that is cheaper than another call."""


@dataclass(frozen=True)
class Embedded:
    """One row of `vectors` (float32, length 1) a text, and how many tokens each text took."""

    vectors: np.ndarray
    tokens: list[int]


def load_embedder(name_or_path: str | Path, *, device: str = "auto") -> Embedder:
    """Load a pulled embedding model by name, or a Hugging Face folder of a BERT by path. It computes in float32."""
    refuse_if_forbidden(name_or_path)
    name, path = str(name_or_path), Library().resolve(str(name_or_path))
    from orchard.weights.encoder import load_encoder, open_encoder

    place = device_of("cpu" if device == "auto" and not may_have_cuda() else device)
    with open_encoder(path, name) as opened:
        tokenizer, frame = _tokenizer(opened.folder)
        return Embedder(load_encoder(opened, device=place), tokenizer, opened.sentence, name=name, frame=frame)


embedder = load_embedder
"""The same under the name that `orchard` has for it."""


class Embedder:
    """An embedding model. Safe to share between threads: their batches take turns, first come, first served, so that a long
    list holds nobody up and the memory of one batch is all there is."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        sentence: Sentence,
        *,
        name: str,
        frame: tuple[list[int], list[int]] = ([], []),
    ) -> None:
        """`frame`: the tokens that stand before and after every text, such as [CLS] and [SEP]."""
        if tokenizer.vocab_size > encoder.config.vocab:
            raise BadFile(
                f"the tokenizer of {name} has {tokenizer.vocab_size:,} tokens, the model {encoder.config.vocab:,}",
                hint="they are of different models; get the model again",
            )
        if sentence.max_tokens <= len(frame[0]) + len(frame[1]):
            raise BadFile(f"{name} leaves no room for a text in {sentence.max_tokens} tokens", hint="get it again")
        self.name = name
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.dim = encoder.config.dim
        self.max_tokens = sentence.max_tokens
        self._lowercase = sentence.lowercase
        self._before, self._after = frame
        self._turns = _Turns()

    def embed(
        self, texts: Sequence[Input], *, truncate: bool = False, cancel: threading.Event | None = None
    ) -> Embedded:
        """A vector for each text. A text longer than `max_tokens` is an error; with `truncate` its end is left out."""
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            raise UsageError(f"embed takes a list of texts, not {type(texts).__name__}", hint="put the text in a list")
        if not texts:
            raise UsageError("there is nothing to embed: the list of texts is empty", hint="give at least one text")
        rows = [self._ids(text, number, truncate) for number, text in enumerate(texts)]
        vectors = np.empty((len(rows), self.dim), np.float32)
        for batch in batches([len(row) for row in rows]):
            if cancel is not None and cancel.is_set():
                raise Cancelled("the embedding was cancelled")
            vectors[batch] = self._vectors([rows[number] for number in batch])
        return Embedded(vectors, [len(row) for row in rows])

    def count(self, text: Input) -> int:
        """Tokens that a text takes, with those that frame every text; it may be longer than `max_tokens`."""
        return len(self._framed(text, 0))

    def _ids(self, text: Input, number: int, truncate: bool) -> list[int]:
        ids = self._framed(text, number)
        if len(ids) <= self.max_tokens:
            return ids
        if not truncate:
            over = len(ids) - self.max_tokens
            hint = f"text {number} is too long: shorten it by at least {over:,} tokens, or ask for it to be truncated"
            raise ContextOverflow(tokens=len(ids), limit=self.max_tokens, hint=hint)
        return ids[: self.max_tokens - len(self._after)] + self._after

    def _framed(self, text: Input, number: int) -> list[int]:
        if isinstance(text, str):
            if not text:
                raise UsageError(f"text {number} is empty", hint="leave it out, or give it words")
            ids = self.tokenizer.encode(text.lower() if self._lowercase else text)
        else:
            ids = self._checked(text, number)
            if ids[: len(self._before)] == self._before and ids[len(ids) - len(self._after) :] == self._after:
                return ids  # they are framed already
        return [*self._before, *ids, *self._after]

    def _checked(self, text: Any, number: int) -> list[int]:
        if isinstance(text, bytes | bytearray) or not isinstance(text, Sequence):
            hint = "each item is a text, or a list of token ids"
            raise UsageError(f"item {number} is neither a text nor token ids, but {type(text).__name__}", hint=hint)
        if not text:
            raise UsageError(f"text {number} is empty", hint="leave it out, or give it tokens")
        most = self.encoder.config.vocab - 1
        for item in text:
            if type(item) is not int or not 0 <= item <= most:
                raise UsageError(
                    f"item {number} holds {item!r:.40}, which is no token id",
                    hint=f"ids are whole numbers from 0 to {most}",
                )
        return list(text)

    def _vectors(self, rows: list[list[int]]) -> np.ndarray:
        """[rows, dim] for sequences of about equal length, in one call of the model."""
        import torch

        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.encoder.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.encoder.device)
        valid = torch.arange(longest, device=self.encoder.device) < lengths[:, None]
        with self._turns.mine(), torch.inference_mode():
            found: np.ndarray = self.encoder.vectors(ids, valid).cpu().numpy()
        return found

    def __repr__(self) -> str:
        return f"Embedder({self.name!r}, {self.dim} dimensions, {self.max_tokens} tokens, {self.encoder.device})"


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Cut texts into batches, by their numbers: longest first, each within `BATCH_TOKENS`, with little padding.

    So the cost grows with the tokens there are, and not with the longest text.
    """
    batch: list[int] = []
    longest = padding = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        wasted = padding + longest - lengths[number]
        full = longest * (len(batch) + 1)
        if batch and (full > BATCH_TOKENS or wasted > max(CALL_TOKENS, full // 16)):
            yield batch
            batch = []
        if not batch:
            longest, padding = lengths[number], 0
        else:
            padding = wasted
        batch.append(number)
    if batch:
        yield batch


class _Turns:
    """A lock that is handed on in the order of asking: a thread that asks again at once does not overtake those who wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def mine(self) -> Iterator[None]:
        ticket = object()
        try:
            with self._changed:
                self._waiting.append(ticket)
                self._changed.wait_for(lambda: self._waiting[0] is ticket)
            yield
        finally:  # also when waiting was interrupted: a ticket left behind would stop everybody
            with self._changed:
                with suppress(ValueError):
                    self._waiting.remove(ticket)
                self._changed.notify_all()


def _tokenizer(folder: HFFolder) -> tuple[Tokenizer, tuple[list[int], list[int]]]:
    """The tokenizer of a folder, and the tokens that it puts before and after a text."""
    if folder.tokenizer is None:
        raise MissingTokenizer(
            f"{folder.path.name} has no tokenizer.json", hint="copy the tokenizer files of the model into the folder"
        )
    what, path = f"the tokenizer of {folder.path.name} cannot be used", folder.tokenizer
    special = folder.special_tokens_map
    tokenizer = guarded(what, lambda: Tokenizer.from_file(path, folder.tokenizer_config, special))
    return tokenizer, guarded(what, lambda: _frame(tokenizer))


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Read off an example; a file without a rule for it means BERT's own."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.to_json())
    bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare and len(whole) > len(bare):
            return whole[:at], whole[at + len(bare) :]
    control = tokenizer.control_tokens
    return [control["[CLS]"]] if "[CLS]" in control else [], [control["[SEP]"]] if "[SEP]" in control else []
