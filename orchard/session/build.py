"""A model as torch modules, and its tokenizer, from its own files: what every other form of it is made from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import MissingTokenizer
from orchard.text.loaded import guarded
from orchard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from orchard.models.language.decoder import Decoder
    from orchard.models.zoo import Family
    from orchard.weights.checkpoint import Checkpoint

    Rewrite = Callable[[Decoder.Config], Decoder.Config]


@dataclass(frozen=True)
class Built:
    """A model as a tree of torch modules, with what its files say of themselves."""

    decoder: Decoder
    family: Family | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)


class Later:
    """Calls `make` when first asked, once, whichever threads ask."""

    def __init__(self, make: Callable[[], Built]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Built | None = None

    def __call__(self) -> Built:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


def build(
    path: Path,
    rewrite: Rewrite | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tokenizer, Built]:
    """A model of torch modules (float32 unless said otherwise) and its tokenizer, from its own files."""
    import torch

    from orchard.weights.checkpoint import open_checkpoint
    from orchard.weights.load import load_decoder

    with open_checkpoint(path) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
        tree = checkpoint.config()
        tree = rewrite(tree) if rewrite is not None else tree
        decoder = load_decoder(checkpoint, tree, dtype=dtype or torch.float32, device=device)
        return tokenizer, Built(decoder, checkpoint.family, checkpoint.hf_config)


def build_stored(path: Path) -> tuple[Tokenizer, Built]:
    """The same with every weight in the format that its file stores it in, code for code."""
    from orchard.weights.checkpoint import open_checkpoint
    from orchard.weights.load import load_decoder
    from orchard.weights.stored import as_stored

    with open_checkpoint(path) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
        decoder = load_decoder(checkpoint, as_stored(checkpoint, checkpoint.config()))
        return tokenizer, Built(decoder, checkpoint.family, checkpoint.hf_config)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with a checkpoint."""
    return guarded(f"the tokenizer of {checkpoint.path.name} cannot be used", lambda: _tokenizer(checkpoint))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    from orchard.weights.compressed_file import CompressedFile
    from orchard.weights.folder import HFFolder

    source = checkpoint.source
    if isinstance(source, CompressedFile):
        data = source.files().get("tokenizer.json")
        if data is None:
            hint = "write it again with the tokenizer's files"
            raise MissingTokenizer(f"{checkpoint.path.name} holds no tokenizer.json", hint=hint)
        return Tokenizer.from_bytes(data, *source.tokenizer_facts())
    if not isinstance(source, HFFolder):
        return Tokenizer.from_gguf(source.metadata)
    if source.tokenizer is None:
        raise MissingTokenizer(
            f"{checkpoint.path.name} has no tokenizer.json",
            hint="copy the tokenizer files of the model into the folder",
        )
    config = dict(source.tokenizer_config or {})
    if source.chat_template is not None:
        config["chat_template"] = source.chat_template
    return Tokenizer.from_file(source.tokenizer, config, source.special_tokens_map, source.generation_config)
