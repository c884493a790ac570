"""What the verbs share: how a prompt is read, how results are printed, how a model is loaded."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from orchard.generate import Answer
    from orchard.session.model import Model

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def note(line: str = "") -> None:
    """A line for the person, kept away from the result."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """JSON on stdout; where stdout takes no UTF-8, everything else is escaped."""
    escaped = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    print(json.dumps(value, indent=indent, ensure_ascii=escaped, default=str))


def printable(text: str) -> str:
    """Text of a model or its file, for a terminal: without the control characters that could steer it."""
    return _CONTROL.sub("\ufffd", text) if sys.stdout.isatty() else text


def console(*, markup: bool = False) -> Console:
    """Where tables go. Off a terminal nothing is cut: a script gets every column whole."""
    from rich.console import Console

    return Console(highlight=False, markup=markup, emoji=False, width=None if sys.stdout.isatty() else 200)


def go_offline(offline: bool) -> None:
    if offline:  # for the packages underneath; Orchard itself opens no connection outside `pull`
        os.environ["HF_HUB_OFFLINE"] = "1"


def human_bytes(amount: float) -> str:
    """98.4 MB: decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            return (
                f"{amount:.0f} B"
                if unit == "B"
                else f"{amount:.3g} {unit}"
                if amount < 99.95
                else f"{amount:.0f} {unit}"
            )
        amount /= 1000
    raise AssertionError("not reached")


def read_prompt(argument: str | None) -> str:
    """The prompt given as an argument, or standard input for `-` or when no terminal is behind it."""
    if argument is not None and argument != "-":
        prompt = argument
    elif argument is None and sys.stdin.isatty():
        raise UsageError("no prompt", hint='write it after the verb, as in: orchard respond "What is a fern?"')
    else:
        prompt = decode_input(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint="write some text as the argument, or on standard input")
    return unicode_text("the prompt", prompt)


def unicode_text(what: str, text: str) -> str:
    """A text of the command line, refused where its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        hint = "write it in UTF-8, or put it in a file and convert that with `iconv -t UTF-8`"
        raise UsageError(f"{what} is not UTF-8 at character {error.start:,}", hint=hint) from error
    return text


def decode_input(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}",
            hint="convert it first, for example with `iconv -t UTF-8`",
        ) from error


def sampling(
    *,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    stop: list[str] | None,
    seed: int | None,
) -> dict[str, Any]:
    """The options of `respond` and `chat` as arguments of `Model.generate`; wrong ones are refused before a model is
    loaded."""
    from orchard.generate.request import Request, Sampling

    choice = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    rest: dict[str, Any] = {"max_tokens": max_tokens, "stop": tuple(stop or ()), "seed": seed}
    Request((0,), sampling=Sampling(**choice), **rest)  # type: ignore[arg-type]
    return choice | rest


def load_model(name: str, draft: str | None = None, experts_budget: str | None = None) -> Model:
    """Load a model, and one that guesses for it. A name that is not there is refused before anything heavy is imported."""
    from orchard.weights.library import Library

    if experts_budget is not None:
        from orchard.core.sizes import bytes_of

        bytes_of(experts_budget)  # a size that is none is told before anything is loaded
    asked = [name] if draft is None or draft == "none" else [name, draft]
    paths = [Library().resolve(one) for one in asked]
    with _saying(f"loading {name} …"):
        from orchard.session.model import load, starts_without_torch

        own = Library().draft_of(paths[0]) if draft is None else None
        paths += [] if own is None else [own]
        if not all(map(starts_without_torch, paths)):
            from orchard.cli.process import import_torch

            import_torch()
        return load(name, draft=draft, experts_budget=experts_budget)


@contextmanager
def _saying(line: str) -> Iterator[None]:
    """A line on the terminal while something takes its time, gone when it is done."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{line}\r", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(line), end="\r", file=sys.stderr, flush=True)


def note_if_cut(answer: Answer, max_tokens: int) -> None:
    """Tell a person that an answer was not finished, and what would let it go on."""
    if answer.finish != "length" or not sys.stderr.isatty():
        return
    if answer.usage.output >= max_tokens:
        note(f"(cut after {max_tokens:,} tokens; --max-tokens N allows more)")
    else:
        note(f"(cut after {answer.usage.output:,} tokens: the model's context is full)")


def messages_for(prompt: str, system: str | None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": unicode_text("the text of --system", system)}] if system else []
    return [*first, {"role": "user", "content": prompt}]
