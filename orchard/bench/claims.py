"""Every bar that the engine is held to, as a claim with its bound. Each names the value that a run gives for it."""

from __future__ import annotations

from orchard.bench import many, speculation
from orchard.core.report import Bound, Claim

LLAMA = "llama.cpp (its best setting)"
BF16 = "transformers in bfloat16"


def _over(figure: str, peer: str, times: float, what: str) -> Claim:
    name, words = ("llama", LLAMA) if peer == "llama.cpp" else ("transformers", BF16)
    return Claim(
        f"{figure.replace(' ', '-')}-{name}",
        f"{what}: at least {times:g} times {words}",
        f"{figure} over {peer}",
        Bound(">=", times),
        baseline=f"{peer} {figure}",
    )


CLAIMS = [
    _over("decode 32", "llama.cpp", 2.0, "Decode of one sequence at 32 tokens, 4-bit"),
    _over("decode 2048", "llama.cpp", 4.0, "Decode of one sequence at 2,048 tokens, 4-bit"),
    _over("decode 32", "transformers", 10.0, "Decode of one sequence at 32 tokens, 4-bit"),
    _over("decode 2048", "transformers", 10.0, "Decode of one sequence at 2,048 tokens, 4-bit"),
    _over("prefill 512", "transformers", 1.5, "Prefill of 512 tokens"),
    _over("prefill 2048", "transformers", 1.5, "Prefill of 2,048 tokens"),
    _over("prefill 512", "llama.cpp", 3.0, "Prefill of 512 tokens"),
    _over("prefill 2048", "llama.cpp", 3.0, "Prefill of 2,048 tokens"),
    _over("batch 8", "llama.cpp", 2.0, "Decode of 8 sequences at once"),
    Claim(
        "shape-4bit-llama",
        "1B shape, 4-bit decode: at least 1.3 times llama.cpp Q4_0",
        "shape 32 4-bit over llama.cpp",
        Bound(">=", 1.3),
        baseline="llama.cpp Q4_0 shape 32",
    ),
    Claim(
        "shape-4bit-bandwidth",
        "1B shape, 4-bit decode: at least 80 % of the bandwidth measured between its runs",
        "orchard 4-bit shape 32 share of bandwidth at the time",
        Bound(">=", 0.8),
        baseline="limit dram",
    ),
    Claim(
        "shape-2bit-llama",
        "1B shape, 2-bit decode: at least twice llama.cpp Q4_0",
        "shape 32 2-bit over llama.cpp",
        Bound(">=", 2.0),
        baseline="llama.cpp Q4_0 shape 32",
    ),
    Claim(
        "start",
        "Process start to first token: no longer than llama.cpp",
        "start over llama.cpp",
        Bound("<=", 1.0),
        baseline="llama.cpp start",
    ),
    *(
        Claim(
            f"memory-{length}",
            f"Peak memory at {length:,} tokens: at most 1.2 times the weight file and the keys and values",
            f"memory {length} over weights and KV",
            Bound("<=", 1.2),
            baseline=f"llama.cpp memory {length}",
        )
        for length in (32, 2048, 8000)
    ),
    Claim(
        "busy",
        "With one core kept busy by another process decode keeps at least 40 % of its quiet figure",
        "busy 32 over quiet",
        Bound(">=", 0.4),
        baseline="busy 32 over quiet, llama.cpp",
    ),
    Claim(
        "repack",
        "Repacking Q4_1 and Q8_0 loses nothing: matrices that differ in any bit",
        "matrices lost",
        Bound("==", 0),
    ),
    *(
        claim
        for way in ("decode", "prefill")
        for claim in (
            Claim(
                f"agreement-{way}",
                f"Best token equal to that of the float32 reading of the same file, over 50 texts ({way})",
                f"agreement {way}",
                Bound(">=", 0.99),
            ),
            Claim(
                f"divergence-{way}",
                f"Divergence from the float32 reading, nats per token ({way})",
                f"divergence {way}",
                Bound("<=", 1e-3),
            ),
        )
    ),
    Claim(
        "linear",
        "The cost of a step grows linearly in cached tokens: R² over 512 to 16,384",
        "linear R2",
        Bound(">=", 0.98),
    ),
    Claim(
        "families",
        "Llama, Qwen2, Qwen3, Mistral and Gemma 3 lower whole: nodes of theirs that run in torch",
        "nodes in torch",
        Bound("==", 0),
    ),
    *many.CLAIMS,
    *speculation.CLAIMS,
]
