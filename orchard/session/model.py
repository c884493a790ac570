"""A loaded model: weights, tokenizer and engine behind four verbs: `logits`, `generate`, `generate_many`, `save`.

model = orchard.load("smollm2")
print(model.generate("What is the capital of France?").text)

On a CPU the native engine runs the model's packed file, and torch is not imported until something asks for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from orchard.core.errors import ContextOverflow, UsageError
from orchard.generate.engine import Engine
from orchard.generate.request import Answer, Request, Sampling
from orchard.session.build import Built, Later, build
from orchard.session.build import tokenizer_of as tokenizer_of
from orchard.session.place import DTYPES, device_of, dtype_of, may_have_cuda
from orchard.text.chat import chat_ids
from orchard.text.messages import Message, messages_from
from orchard.text.tokenizer import Tokenizer
from orchard.weights.library import Library

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from orchard.generate.experts import ExpertsProgram
    from orchard.generate.experts_open import ExpertsOptions
    from orchard.generate.protocol import Runner
    from orchard.generate.stream import Stream
    from orchard.models.language.decoder import Decoder
    from orchard.models.zoo import Family
    from orchard.ops.plan.steps import Plan
    from orchard.session.adapters import Adapters
    from orchard.session.subnets import Subnets


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
    draft: str | Path | bool | None = None,
    experts_budget: int | str | ExpertsOptions | None = None,
) -> Model:
    """Load a pulled model by name, or a GGUF file, compressed file (`.orchard`) or Hugging Face folder by path.

    `dtype` "auto" on a CPU runs the native engine, on weights as the file stores them; the first load of a model packs it for
    that engine. On a CUDA device the same weights run in kernels of their own. Without native kernels (`orchard doctor` says
    why), and for models that the kernels do not cover, it computes in float32 on a CPU, and on an accelerator in bfloat16. A
    dtype that is named ("float32", "bfloat16", "float16") is computed in by torch, as is everything under `ORCHARD_NATIVE=0`.
    `rewrite` changes the config tree before anything is built: other weight formats, other stores, other parts. `draft` names a
    smaller model of the same vocabulary that guesses tokens for this one: answers stay the same and come sooner where that pays.
    A model of the library that came with a draft uses it unless another is named, or none (`draft=False`, or "none").
    `experts_budget` (bytes, or "200MB") leaves the experts of a mixture in a file and keeps no more of them in memory than that;
    answers stay the same, bit for bit. The file is made by the first such load. `ExpertsOptions` says more.
    """
    if experts_budget is None:
        model = _loaded(name_or_path, dtype, device, rewrite)
    else:
        from orchard.session.experts import load_elsewhere

        model = load_elsewhere(name_or_path, experts_budget, dtype=dtype, device=device, rewritten=rewrite is not None)
    guessing = draft_for(model.source, draft)
    if guessing is not None:
        model.guess_with(load(guessing, dtype=dtype, device=device, draft=False))
    return model


def draft_for(source: Path | None, asked: str | Path | bool | None) -> str | Path | None:
    """The draft that a model at a path is loaded with: the one asked for, or the one it came with."""
    if asked is False or asked == "none":
        return None
    if asked is None or asked is True:
        return Library().draft_of(source) if source is not None else None
    return asked


def _loaded(
    name_or_path: str | Path, dtype: str, device: str, rewrite: Callable[[Decoder.Config], Decoder.Config] | None
) -> Model:
    if dtype not in DTYPES:
        raise UsageError(f"no dtype called {dtype!r}", hint="one of " + ", ".join(DTYPES))
    if os.environ.get("ORCHARD_FORBID_MODELS"):  # seldom, so what it means is looked up only then
        from orchard.session.assets import refuse_if_forbidden

        refuse_if_forbidden(name_or_path)
    path = Library().resolve(str(name_or_path))
    on_cpu = device == "cpu" or (device == "auto" and not may_have_cuda()) or device_of(device).type == "cpu"
    if dtype == "auto" and on_cpu:
        native = _native(str(name_or_path), path, rewrite)
        if native is not None:
            return native
    place = device_of(device)
    if dtype == "auto" and place.type == "cuda":
        compiled = _on_gpu(str(name_or_path), path, rewrite, place)
        if compiled is not None:
            return compiled
    kind = dtype_of(dtype, place)
    tokenizer, built = build(path, rewrite, kind, place)
    return Model(built, tokenizer, name=str(name_or_path), source=path)


def starts_without_torch(path: Path) -> bool:
    """Whether `load` will find all it needs for the model at a path without importing torch."""
    from orchard.ops.kernels.native import library
    from orchard.session.prepare import packed_path

    return not may_have_cuda() and library() is not None and packed_path(path).is_file()


def _native(name: str, path: Path, rewrite: Callable[[Decoder.Config], Decoder.Config] | None) -> Model | None:
    """The model on the native engine; None where there are no native kernels or the model has no plan."""
    from orchard.ops.kernels.native import library

    if library() is None:
        return None
    from orchard.generate.native import NativeRunner
    from orchard.session.prepare import made, ready

    found = ready(path) if rewrite is None else made(path, rewrite)
    if found.plan is None or found.tokenizer is None:
        return None
    later = Later(lambda: build(path, rewrite)[1])
    runner = NativeRunner(found.plan, decoder=lambda: later().decoder)
    return Model(later, found.tokenizer, name=name, source=path, plan=found.plan, runner=runner)


def _on_gpu(
    name: str, path: Path, rewrite: Callable[[Decoder.Config], Decoder.Config] | None, place: torch.device
) -> Model | None:
    """The model's plan on a GPU; None where there is no plan, or one with steps that have no kernel there."""
    from orchard.core.errors import MissingExtra, UnsupportedPair
    from orchard.generate.cuda.runner import CudaRunner
    from orchard.session.prepare import made, ready

    found = ready(path) if rewrite is None else made(path, rewrite)
    if found.plan is None and rewrite is None:  # without native kernels nothing is packed, but there may be a plan
        found = made(path)
    if found.plan is None or found.tokenizer is None:
        return None
    try:
        runner = CudaRunner(found.plan, device=place)
    except (UnsupportedPair, MissingExtra):
        return None
    later = Later(lambda: build(path, rewrite)[1])
    return Model(later, found.tokenizer, name=name, source=path, plan=found.plan, runner=runner)


class Model:
    """A model with its tokenizer. Safe to share between threads: each call has stores of its own.

    `runner` is what generates. `decoder` is the same model as a tree of torch modules: for a model that runs natively it is
    built, in float32 from the model's own files, when `decoder`, `config`, `logits` or `save` first ask for it.
    """

    def __init__(
        self,
        decoder: Decoder | Built | Later,
        tokenizer: Tokenizer,
        *,
        name: str,
        source: Path | None = None,
        plan: Plan | None = None,
        runner: Runner | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`decoder`: torch modules, or what makes them when they are needed. Without a `runner` they generate. `engine`: one that
        is there already, and has the runner."""
        self.tokenizer = tokenizer
        self.name = name
        self.source = source
        self.plan = plan
        self._later = decoder if isinstance(decoder, Later) else Later(lambda: _built(decoder))
        if engine is None:
            if runner is None:
                from orchard.generate.torch_forward import TorchRunner

                runner = TorchRunner(self.decoder)
            engine = Engine(runner, tokenizer)
        self.engine = engine
        self._runner = runner or engine.model
        self.draft: Model | None = None
        """The model that guesses tokens for this one, if there is one."""
        self.aside: Engine | None = None
        """Answers what is no part of a conversation, where `engine` answers nothing else."""

    def guess_with(self, draft: Model) -> None:
        """Let a smaller model guess tokens from now on, for requests that always take the likeliest token and for those that ask
        for it (`Speculation(kind="draft")`). No answer changes. `DraftMismatch` where its vocabulary is another."""
        from orchard.generate.speculative.model import check_vocabulary

        check_vocabulary(self.runner, draft.runner, self.tokenizer, draft.tokenizer)
        self.engine.guess_with(draft.runner)
        self.draft = draft

    @property
    def runner(self) -> Runner:
        """What scores tokens when the model generates: the native engine, kernels on a GPU, or torch."""
        return self._runner

    @property
    def experts(self) -> ExpertsProgram | None:
        """What runs experts that live elsewhere: its `resident` counts, its `recorder` writes traces. None for other models."""
        program: Any = getattr(self.runner, "program", None)
        return program if hasattr(program, "resident") else None

    @property
    def built(self) -> Built:
        """The torch modules, the family and the Hugging Face config; made when first asked for."""
        return self._later()

    @property
    def decoder(self) -> Decoder:
        """The model as a tree of torch modules."""
        return self.built.decoder

    @property
    def family(self) -> Family | None:
        """The family that the model's files belong to."""
        return self.built.family

    @property
    def hf_config(self) -> dict[str, Any]:
        """The model's config in Hugging Face's words."""
        return self.built.hf_config

    @property
    def config(self) -> Decoder.Config:
        """The config tree the model was built from."""
        return self.decoder.config

    @cached_property
    def adapters(self) -> Adapters:
        """Adapters that are loaded on this model; each set of them is a model that shares these weights."""
        from orchard.session.adapters import Adapters

        return Adapters(self)

    @cached_property
    def subnets(self) -> Subnets:
        """Sub-networks: fewer hidden units for each prompt, or for a task, on the same engine."""
        from orchard.session.subnets import Subnets

        return Subnets(self)

    @property
    def context(self) -> int:
        """The tokens that fit, prompt and answer together."""
        return self.runner.config.context

    def logits(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Scores for the next token after every position, by torch: float32 [batch, length, vocab]."""
        import torch

        from orchard.core.context import Context

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
        with torch.inference_mode():
            out: Tensor = self.decoder(batch, Context.whole(batch))
        # A copy outside inference mode, so that the caller may do anything with it.
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
        """Write the model: a GGUF file where the path ends in `.gguf` (type f32, f16, bf16, q8_0, q4_0), a compressed file where
        it ends in `.orchard` (weights as the torch modules keep them), otherwise a Hugging Face folder (type float32, float16,
        bfloat16)."""
        from orchard.session.save import save_model

        save_model(self, Path(path), type)

    def __repr__(self) -> str:
        if self.plan is not None:
            layers = sum(step.kind == "attend" for step in self.plan.steps)
            return f"Model({self.name!r}, {layers} layers, width {self.plan.dim}, native on cpu)"
        layers, dtype = len(self.config.stack.layers), str(self.decoder.dtype).removeprefix("torch.")
        return f"Model({self.name!r}, {layers} layers, width {self.config.dim}, {dtype} on {self.decoder.device})"


def _built(decoder: Decoder | Built) -> Built:
    return decoder if isinstance(decoder, Built) else Built(decoder)
