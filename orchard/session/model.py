"""A loaded model: weights, tokenizer and engine behind four verbs: `logits`, `generate`, `generate_many`, `save`.

model = orchard.load("smollm2")
print(model.generate("What is the capital of France?").text)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.core.errors import ContextOverflow, MissingTokenizer, UsageError
from orchard.generate import Answer, Engine, Request, Sampling, Stream
from orchard.models.language.decoder import Decoder
from orchard.text.chat import chat_ids
from orchard.text.loaded import guarded
from orchard.text.messages import Message, messages_from
from orchard.text.tokenizer import Tokenizer
from orchard.weights.checkpoint import Checkpoint, open_checkpoint
from orchard.weights.folder import HFFolder
from orchard.weights.library import Library
from orchard.weights.load import load_decoder

if TYPE_CHECKING:
    from orchard.models.zoo import Family


class Options(TypedDict, total=False):
    """What a call may set. Everything has a default: greedy, 256 tokens, no stops."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    stop: str | Sequence[str]
    seed: int | None
    logprobs: int | bool | None
    """True: the chosen token's; a number: as many alternatives beside it."""


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[Message] | Sequence[int]
"""A text, a conversation, or token ids."""


def load(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    rewrite: Callable[[Decoder.Config], Decoder.Config] | None = None,
) -> Model:
    """Load a pulled model by name, or a GGUF file or Hugging Face folder by path.

    `dtype` "auto" computes in float32 on a CPU and bfloat16 on an accelerator. `rewrite` changes the config tree before
    anything is built: other weight formats, other stores, other parts.
    """
    place = _device(device)
    kind = _dtype(dtype, place)
    path = Library().resolve(str(name_or_path))
    with open_checkpoint(path) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
        tree = checkpoint.config()
        decoder = load_decoder(checkpoint, rewrite(tree) if rewrite is not None else tree, dtype=kind, device=place)
        return Model(
            decoder,
            tokenizer,
            name=str(name_or_path),
            family=checkpoint.family,
            hf_config=checkpoint.hf_config,
            source=checkpoint.path,
        )


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with a checkpoint."""
    return guarded(f"the tokenizer of {checkpoint.path.name} cannot be used", lambda: _tokenizer(checkpoint))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    source = checkpoint.source
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


class Model:
    """A decoder with its tokenizer. Safe to share between threads: each call has stores of its own."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        name: str,
        family: Family | None = None,
        hf_config: dict[str, Any] | None = None,
        source: Path | None = None,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.name = name
        self.family = family
        self.hf_config = hf_config or {}
        self.source = source
        self.engine = Engine(decoder, tokenizer)

    @property
    def config(self) -> Decoder.Config:
        """The config tree the model was built from."""
        return self.decoder.config

    @torch.inference_mode()
    def logits(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Scores for the next token after every position: float32 [batch, length, vocab]."""
        try:
            batch = torch.as_tensor(ids, dtype=torch.long, device=self.decoder.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"not a table of token ids: {error}", hint="rows must have equal lengths") from error
        batch = batch[None] if batch.ndim == 1 else batch
        if batch.ndim != 2 or not batch.numel():
            raise UsageError(f"ids have shape {tuple(batch.shape)}", hint="give [length] or [batch, length]")
        if int(batch.min()) < 0 or int(batch.max()) >= self.config.vocab:
            raise UsageError("a token id is outside the vocabulary", hint=f"ids go from 0 to {self.config.vocab - 1}")
        if batch.shape[1] > self.config.context:
            raise ContextOverflow(tokens=batch.shape[1], limit=self.config.context)
        out: Tensor = self.decoder(batch, Context.whole(batch))
        # A copy outside inference mode, so that the caller may do anything with it.
        with torch.inference_mode(False):
            return out.float().clone()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: ids as they are, messages through the chat template, and a text as one user message
        (or, for a model without a template, as text to continue)."""
        if isinstance(prompt, list | tuple) and prompt and all(type(item) is int for item in prompt):
            return [int(item) for item in prompt]
        messages = messages_from(prompt)  # type: ignore[arg-type]
        if isinstance(prompt, str) and self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt, bos=self.tokenizer.add_bos)
        return chat_ids(self.tokenizer, messages)

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        cancel: threading.Event | None = None,
        **options: Unpack[Options],
    ) -> Answer: ...
    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        stream: Literal[True],
        cancel: threading.Event | None = None,
        **options: Unpack[Options],
    ) -> Stream: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool = False,
        cancel: threading.Event | None = None,
        **options: Unpack[Options],
    ) -> Answer | Stream:
        """Answer a prompt (see `Options` for what can be set). With `stream`, an iterator of pieces whose `.answer` is
        there at the end."""
        request = self.request(prompt, **options)
        if stream:
            return self.engine.stream(request, cancel=cancel)
        return self.engine.answer([request], cancel=cancel)[0]

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        cancel: threading.Event | None = None,
        **options: Unpack[Options],
    ) -> list[Answer]:
        """Answer several prompts at once; each gets what it would have got alone (up to rounding in the matrices)."""
        if isinstance(prompts, str | bytes):
            raise UsageError("generate_many takes a list of prompts", hint="for one prompt there is generate")
        requests = [self.request(prompt, **options) for prompt in prompts]
        return self.engine.answer(requests, cancel=cancel)

    def request(self, prompt: Prompt, **options: Unpack[Options]) -> Request:
        """A prompt and its options as the engine takes them; wrong options raise here."""
        unknown = sorted(options.keys() - Options.__annotations__.keys())
        if unknown:
            known = ", ".join(Options.__annotations__)
            raise UsageError(f"no option called {', '.join(unknown)}", hint=f"options are {known}")
        chosen = {name: value for name, value in options.items() if name in SAMPLING}
        others: dict[str, Any] = {name: value for name, value in options.items() if name not in SAMPLING}
        if isinstance(others.get("logprobs"), bool):
            others["logprobs"] = 0 if others["logprobs"] else None
        stop = others.pop("stop", None)
        if isinstance(stop, str | list | tuple):
            others["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        elif stop is not None:
            raise UsageError(f"stop is {stop!r}", hint="give a text, or a list of texts")
        return Request(tuple(self.prompt_ids(prompt)), sampling=Sampling(**chosen), **others)  # type: ignore[arg-type]

    def save(self, path: str | Path, *, type: str | None = None) -> None:
        """Write the model: a GGUF file where the path ends in `.gguf` (type f32, f16, bf16, q8_0, q4_0), otherwise a
        Hugging Face folder (type float32, float16, bfloat16)."""
        from orchard.session.save import save_model

        save_model(self, Path(path), type)

    def __repr__(self) -> str:
        layers, dtype = len(self.config.stack.layers), str(self.decoder.dtype).removeprefix("torch.")
        return f"Model({self.name!r}, {layers} layers, width {self.config.dim}, {dtype} on {self.decoder.device})"


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise UsageError(f"there is no device {name!r} here", hint="`orchard doctor` shows what there is") from error
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"no dtype called {name!r}", hint="auto, float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
