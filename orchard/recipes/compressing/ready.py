"""Ready plans: what most people want, by one word."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    about: str
    steps: tuple[str, ...]
    budget: str | None = None


READY: dict[str, Ready] = {
    "int8": Ready("eight bits, as good as the original", ("rtn:bits=8", "embed8")),
    "int4": Ready("four bits by rounding, in seconds", ("rtn:bits=4", "embed8")),
    "gptq4": Ready("four bits, second order: better than rounding, in minutes", ("gptq:bits=4", "embed8")),
    "awq4": Ready("four bits, scaled by what is read, in minutes", ("awq:bits=4", "embed8")),
    "palette": Ready("four bits by tables", ("palettize:bits=4", "embed8")),
    "codec": Ready("3.56 bits by blocks, with the leading directions beside them", ("blocks:r=16", "embed4")),
    "mix": Ready(
        "2 and 4 bits by sensitivity, trained, with side paths to recover",
        ("mixed:train=true", "recover:r=8"),
        "3.2bpw",
    ),
    "2bit": Ready(
        "2 bits everywhere, trained and recovered; shared keys and values in eight bits",
        ("share-kv", "heal", "qat:bits=2", "recover:r=8", "kv8"),
    ),
    "on-device": Ready(
        "the smallest that is still good: shared keys and values, 2 and 4 bits, trained, recovered",
        ("share-kv", "heal", "mixed:train=true", "recover:r=8", "kv8"),
        "3.2bpw",
    ),
}
