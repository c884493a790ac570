"""Whether a model still does what it is told, by the checks of `orchard.evals.following`: all of them in one batch, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from orchard.evals.following import MAX_TOKENS, follow, following
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Plain
from orchard.nn.formats.learned_once import forget, once
from orchard.nn.linear import Weight
from orchard.recipes.own_text import Script, own_turns
from orchard.text.chat import chat_ids
from orchard.text.tokenizer import Tokenizer

FOLLOWING = "following"
"""What these tasks are called where a file of questions could be named."""
GREEDY = 1e-4


def follows(model: Any) -> dict[str, float]:
    """By kind, the share of checks that pass. `model`: an `orchard.session.model.Model`."""
    decoder, tokenizer = model.decoder, model.tokenizer
    found = follow(following(), lambda prompts: greedy_answers(decoder, tokenizer, prompts))
    return found.by_kind


def greedy_answers(
    decoder: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int = MAX_TOKENS
) -> list[str]:
    """The likeliest answer to each prompt, up to so many tokens."""
    openings = [chat_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    length = min(max(map(len, openings)) + tokens, decoder.config.context)
    ends = [i for i in tokenizer.eos_ids if i < decoder.config.vocab]
    scripts = [Script([opening]) for opening in openings]
    rows: dict[str, Any] = {"rows": len(openings), "batch": len(openings), "length": length, "ends": ends}
    packed = any(isinstance(one, Weight) and not isinstance(one.format, Plain) for one in decoder.modules())
    try:
        # A step unpacks everything otherwise, and there are many.
        with torch.no_grad(), once(decoder) if packed else nullcontext():
            ids, chosen = own_turns(decoder, scripts, temperature=GREEDY, **rows)
    finally:
        forget(decoder)
    return [_first(tokenizer, *row, ends, tokens) for row in zip(ids, chosen, strict=True)]


def _first(tokenizer: Tokenizer, ids: np.ndarray, chosen: np.ndarray, ends: Sequence[int], tokens: int) -> str:
    """What stands between the opening and the first end."""
    begin = int(chosen.argmax()) if chosen.any() else len(ids)
    said = ids[begin : begin + tokens].tolist()
    stop = next((place for place, token in enumerate(said) if token in ends), len(said))
    return tokenizer.decode(said[:stop])
