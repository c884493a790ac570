"""One prompt, one answer, written as it comes: what `orchard respond` does, without the parser in front of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from orchard.cli import common
from orchard.core.errors import ContextOverflow

if TYPE_CHECKING:
    from orchard.generate import Answer
    from orchard.session.model import Model


def respond_to(
    prompt: str | None = None,
    *,
    model: str = "smollm2",
    draft: str | None = None,
    experts_budget: str | None = None,
    system: str | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: list[str] | None = None,
    seed: int | None = None,
    offline: bool = False,
    as_json: bool = False,
) -> None:
    """Answer one prompt; the arguments are the options of `orchard respond`."""
    common.go_offline(offline)
    text = common.read_prompt(prompt)
    settings = common.sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
    )
    answer_once(
        text,
        name=model,
        draft=draft,
        experts_budget=experts_budget,
        system=system,
        settings=settings,
        as_json=as_json,
    )


def answer_once(
    prompt: str,
    *,
    name: str,
    draft: str | None,
    system: str | None,
    settings: dict[str, Any],
    as_json: bool,
    experts_budget: str | None = None,
) -> None:
    """Load, answer, print. `chat` comes here too when its input is not a terminal."""
    # A text alone also suits a model without a chat template, which continues it.
    messages = common.messages_for(prompt, system) if system else prompt
    model = common.load_model(name, draft, experts_budget)
    try:
        if as_json:
            answer = model.generate(messages, **settings)
        else:
            answer = write_stream(model, messages, settings)
    except ContextOverflow as error:
        error.hint = f"shorten the prompt by at least {error.tokens + 1 - error.limit:,} tokens"
        raise
    if as_json:
        usage = {"input": answer.usage.input, "output": answer.usage.output}
        facts = {"text": answer.text, "ids": list(answer.ids), "finish": answer.finish, "usage": usage}
        common.print_json(facts | {"seed": answer.seed, "model": name}, indent=None)
    else:
        common.note_if_cut(answer, settings["max_tokens"])


def write_stream(
    model: Model, messages: str | list[dict[str, str]], settings: dict[str, Any], heard: list[str] | None = None
) -> Answer:
    """Write an answer piece by piece, and end its line however it ended; `heard` collects the pieces, so that an
    interrupted answer is not lost."""
    heard = heard if heard is not None else []
    stream = model.generate(messages, stream=True, **settings)
    try:
        for piece in stream:
            heard.append(piece.text)
            sys.stdout.write(common.printable(piece.text))
            sys.stdout.flush()
    except BaseException:
        if heard:
            print(flush=True)
        raise
    finally:
        stream.close()
    print(flush=True)
    return stream.answer
