"""The bars that a compressed model is held to, beside the original 4-bit file: one set for mixed bits, one for two bits.

They were set before anything was trained. Every claim names a value that a run gives (`ondevice` and its neighbours); a run that
cannot give it leaves the claim failed, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from orchard.core.errors import UsageError
from orchard.core.report import Bound, Claim

ORIGINAL = "original"
"""What values of the original are called after."""
KV = Fraction(19, 30)
"""Of the keys and values, before they are coded in 8 bits: the last 11 of 30 layers keep none."""
Q2_K, Q4_0, TORCHAO = "llama.cpp Q2_K", "llama.cpp Q4_0", "torchao 2-bit"
Q2_0 = "llama.cpp Q2_0"
"""No bar names it; but where rows are no multiple of 256, Q2_K falls back to about four bits, and this one does not."""
PROMPT = 2048
SHORT = 32
CHECKS = 100
"""Of each of three kinds."""
LOSS_WORDS = {
    "own": "text that the original wrote",
    "books": "held-out books",
    "wikipedia": "Wikipedia prose",
    "web": "web prose",
}


@dataclass(frozen=True)
class Bars:
    """The bounds of one model."""

    file: float
    megabytes: float
    decode: float
    ttft: float
    following: float
    loss: Mapping[str, float] = field(hash=False)
    bits: float | None = None


BARS = {
    "mix": Bars(
        file=0.60,
        megabytes=58,
        bits=3.2,
        decode=1.2,
        ttft=1.3,
        following=0.92,
        loss={"own": 1.08, "books": 1.08, "wikipedia": 1.12, "web": 1.12},
    ),
    "2bit": Bars(
        file=0.46,
        megabytes=45,
        decode=1.5,
        ttft=1.3,
        following=0.75,
        loss={"own": 1.20, "books": 1.20, "wikipedia": 1.30, "web": 1.30},
    ),
}


def bars_named(name: str) -> str:
    """Which bars a model is held to, by its name: `smollm2-2bit` to those of `2bit`."""
    found = [bars for bars in BARS if bars in name]
    if len(found) != 1:
        raise UsageError(
            f"{name} does not say which bars it is held to",
            hint="write " + " or ".join(f"{bars}=FILE" for bars in BARS),
        )
    return found[0]


def claims_of(name: str, bars: str) -> list[Claim]:
    """Every claim about one model."""
    bar = BARS[bars]

    def claim(what: str, statement: str, metric: str, op: str, limit: float, baseline: str | None = None) -> Claim:
        return Claim(f"{name}-{what}", f"{name}: {statement}", f"{name} {metric}", Bound(op, limit), baseline)

    found = [
        claim("kv", "keys and values are 19/30 of the original's, before 8 bits", "KV over original", "==", float(KV)),
        claim("file", f"the file is at most {bar.file:g} of the 4-bit file", "file over original", "<=", bar.file),
        claim("bytes", f"the file has at most {bar.megabytes:g} MB", "file", "<=", int(bar.megabytes * 1_000_000)),
        claim("exact", "bytes that are counted otherwise than the file has them", "bytes off", "==", 0),
        claim(
            "decode",
            f"decode at {SHORT} tokens is at least {bar.decode:g} times as fast as the 4-bit file in the same engine",
            f"decode {SHORT} over original",
            ">=",
            bar.decode,
            f"{ORIGINAL} decode {SHORT}",
        ),
        claim(
            "ttft",
            f"the first token after {PROMPT:,} comes at least {bar.ttft:g} times as soon",
            f"TTFT {PROMPT} gain over original",
            ">=",
            bar.ttft,
            f"{ORIGINAL} TTFT {PROMPT}",
        ),
        *(
            claim(
                f"loss-{kind}",
                f"loss on {LOSS_WORDS[kind]} is at most {most:g} times the original's in bfloat16",
                f"loss ratio {kind}",
                "<=",
                most,
                f"{ORIGINAL} loss {kind}",
            )
            for kind, most in bar.loss.items()
        ),
        claim(
            "following",
            f"keeps at least {bar.following:.0%} of the original's score on the 300 checks",
            f"following {3 * CHECKS} over original",
            ">=",
            bar.following,
            f"{ORIGINAL} following {3 * CHECKS}",
        ),
        *(
            claim(what, f"KL to the original is below that of {peer}, on the same tokens", f"KL over {peer}", "<", 1.0)
            for what, peer in (("kl-llama", Q2_K), ("kl-torchao", TORCHAO))
        ),
    ]
    if bar.bits is not None:
        words = f"at most {bar.bits:g} bits per weight of the original, all in"
        found.insert(3, claim("bits", words, "bits per weight", "<=", bar.bits))
    return found
