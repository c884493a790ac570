"""CommVQ: keys and values of one or two bits, by codebooks that commute with rotary positions.

Li et al. (arXiv 2506.18879, ICML 2025). Keys are coded before they are rotated, as sums of codewords of the form c_A + i·c_B over
pairs of channels seen as complex numbers. Such sums commute with rotations, so attention can be computed from tables of the
query and the codewords, and keys are never put together. Values are coded additively too. Published: keys and values of Llama 3.1
8B in an eighth of the memory of float16 with nearly the same answers (LongBench), and usable at one bit, where others fail.

Here a small model with heads of 64 channels is trained on made-up text, codebooks are fitted to its keys and values on some of
it, and everything is measured on other text: errors against scalar codes of the same bits and against residual vector
quantisation without the constraint, and the loss of the model with coded keys and values. At scale `full` the same is done to
SmolLM2-135M, where it is at hand, on this project's own pages. Parts: `orchard.ops.vq*`, `orchard.cache.codecs.commvq`,
`transforms.fit_codebooks`.

What differs from the paper: values have additive codes like keys, not a trained encoder; a codeword is chosen among 16·16 instead
of 64·64, with more rounds; a prescale for each head and not for each token; offsets are taken off before, and errors are weighed
by what queries and output maps make of them. The first four tokens stay as they are. Two bits are counted with prescales (14
rounds of 8 bits and 16 bits for 64 channels); one bit is 8 rounds, and 1.25 bits with the prescale.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from orchard.core.errors import ModelNotFound
from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold
from orchard.ops import rope, vq
from orchard.ops.vq import Codebooks
from orchard.studies import _commvq_codes as codes
from orchard.studies import _commvq_models as models
from orchard.studies._afm_ground import device
from orchard.studies._commvq_models import HEAD, Size
from orchard.studies.harness import Outcome
from orchard.transforms.fit_codebooks import FitCodebooks
from orchard.transforms.kv_samples import Samples, samples_of

SCALES = {"small": Size(), "full": Size(steps=1500, fitted=50_000, measured=256)}
SMOL = {"length": 512, "fitted": 48, "measured": 12, "tokens": 16_384}
"""Rows of SmolLM2, at scale `full`."""
ONE, TWO = 8, 14
"""Rounds."""
CLAIMS = [
    Claim("commutes", "Sums of rotated codewords are rotated sums", "commutation", Bound("<", 1e-5)),
    Claim("tables", "Scores from tables are explicit scores", "tables", Bound("<=", 1e-4)),
    Claim("scalar", "One bit: less is lost of keys than by the two best levels a channel", "over_scalar", Bound("<=", 0.6),
    "mse_scalar"), Claim("token", "… and than by one bit a number with scales by token", "over_token", Bound("<=", 0.8),
    "mse_token"), Claim("loss1", "One bit costs less loss than scalar ones", "loss_over_scalar", Bound("<=", 0.4),
    "increase_scalar"), Claim("loss2", "Two bits cost next to nothing", "increase_2bit", Bound("<=", 0.02), "loss"),
    Claim("price", "Commuting costs little", "over_free", Bound("<=", 1.5), "mse_free"),
    Claim("bytes", "Two bits with prescales are a seventh of float16 at most", "bytes_2bit", Bound("<=", 1 / 7)),
    Claim("smol-loss", "SmolLM2 at two bits says the same", "smollm2.increase_2bit", Bound("<=", 0.02), "smollm2.loss"),
    Claim("smol-bytes", "… in 13 % of the bytes of float16, prescales and first tokens counted", "smollm2.cut", Bound(">=",
    0.87)), ]  # fmt: skip
NOTES = [
    "Errors are mean squares over all layers and heads of unrotated keys that nothing was fitted to; losses are nats a token.",
    "Scalar: per channel the two levels that lose least (Lloyd), fitted on the same keys; the loss with both keys and values so.",
    "By token: one bit and, for each group of 32 numbers, two float16 (2 bits a number in all): mean and mean distance from it.",
    "Free: residual vector quantisation with 256 codewords of their own in each of 8 rounds, the same bits and prescale.",
    "Effective rank: the participation ratio of the covariance of keys; residual codes gain where it is small.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    seed = fold(seed, "commvq") % 2**31
    values, by_layer = small_model(size, seed)
    reasons = {}
    if scale == "full":
        try:
            values |= smollm2(seed)
        except ModelNotFound:
            reasons = dict.fromkeys(("smol-loss", "smol-bytes"), "the model is not here: `orchard pull smollm2`")
    else:
        reasons = dict.fromkeys(("smol-loss", "smol-bytes"), "measured at scale full")
    price, rank = (float(values[name].value) for name in ("over_free", "effective_rank"))  # type: ignore[union-attr, arg-type]
    if price > 1.5:
        reasons["price"] = (
            f"keys of this model use {rank:.1f} of {HEAD} directions, so 256 free codewords a round nearly list them; both lose "
            "little (see the series)"
        )
    return Outcome(
        values=values,
        series={"layer, code, error of keys as a share of their variance": by_layer},
        notes=NOTES,
        reasons=reasons,
        config={**asdict(size), "rounds": [ONE, TWO]},
    )


def small_model(size: Size, seed: int) -> tuple[dict[str, Value | Scalar], list[Any]]:
    model = models.trained(size, seed)
    return measured(model, size, seed)


def measured(
    model: Any, size: Size, seed: int, soft: int = 3, steps: int = 5
) -> tuple[dict[str, Value | Scalar], list[Any]]:
    """Everything about a small model that is trained."""
    read = models.texts(size, seed, "fitted", -(-size.fitted // size.length))
    apart = models.texts(size, seed, "compared", max(size.measured // 2, 1))
    found, other = (
        {layer: each.to(device()) for layer, each in some.items()}
        for some in (
            samples_of(model, read, tokens=size.fitted, skip=4, who="commvq", seed=seed),
            samples_of(model, apart, tokens=4000, skip=4, who="commvq", seed=seed),
        )
    )
    fit = FitCodebooks(file="", rounds=ONE, tokens=size.fitted, soft=soft, steps=steps, seed=seed, weighted=False)
    errors: dict[str, list[float]] = {name: [] for name in ("coded", "scalar", "token", "free", "variance")}
    by_layer, exact, ranks = [], [], []
    for layer, mine in found.items():
        books, keys = fit.fitted(mine), other[layer].k
        coders = {
            "coded": codes.coded_keys(books),
            "scalar": codes.two_levels(mine.k),
            "token": codes.by_token,
            "free": codes.free_residual(mine.k, ONE, 256, seed=seed),
        }
        variance = float((keys - keys.mean(1, keepdim=True)).square().mean())
        for name, coder in coders.items():
            errors[name].append(codes.error(coder, keys))
            by_layer.append([layer, name, round(errors[name][-1] / variance, 4)])
        errors["variance"].append(variance)
        exact.append(codes.commutation(books, keys[:, :500], rope.frequencies(10_000.0, HEAD).to(keys.device), seed))
        ranks.append(codes.effective_rank(keys))
    mse = {name: statistics.fmean(each) for name, each in errors.items()}
    values: dict[str, Value | Scalar] = {
        "commutation": max(each[0] for each in exact),
        "tables": max(each[1] for each in exact),
        **{f"mse_{name}": value for name, value in mse.items()},
        "over_scalar": Value(mse["coded"] / mse["scalar"], "x"),
        "over_token": Value(mse["coded"] / mse["token"], "x"),
        "over_free": Value(mse["coded"] / mse["free"], "x"),
        "effective_rank": Value(statistics.fmean(ranks), f"of {HEAD} directions"),
    }
    return values | losses(model, size, found, fit, seed), by_layer


def losses(
    model: Any, size: Size, found: dict[int, Samples], fit: FitCodebooks, seed: int
) -> dict[str, Value | Scalar]:
    """What coded keys and values cost the model, and what they take."""
    held = models.texts(size, seed, "held out", size.measured)
    plain = models.loss(model, held)
    scalar = {layer: (codes.two_levels(each.k), codes.two_levels(each.v)) for layer, each in found.items()}
    made = {"scalar": models.loss(model, held, coders=scalar) - plain}
    sizes = {}
    for name, rounds in (("1bit", ONE), ("2bit", TWO)):
        each = replace(fit, rounds=rounds, weighted=True)
        books = {layer: each.fitted(mine, model.stack.layers[layer].mixer) for layer, mine in found.items()}
        made[name] = models.loss(model, held, coders={layer: _both(own) for layer, own in books.items()}) - plain
        sizes[name] = 8 * (rounds + 2) / HEAD
    return {
        "loss": Value(plain, "nats"),
        **{f"increase_{name}": Value(value, "nats") for name, value in made.items()},
        "loss_over_scalar": Value(made["1bit"] / made["scalar"], "x"),
        **{f"bits_{name}": Value(value, "bits a number, prescale counted") for name, value in sizes.items()},
        "bytes_2bit": Value(sizes["2bit"] / 16, "of float16"),
    }


def _both(books: Codebooks) -> tuple[codes.Coder, codes.Coder]:
    def values(y: Tensor) -> Tensor:
        return vq.decode_values(books, *vq.encode_values(books, y[None], codes.BEAM))[0]

    return codes.coded_keys(books), values


def smollm2(seed: int, sizes: dict[str, int] | None = None, **fit: Any) -> dict[str, Value | Scalar]:
    """The same for a model that talks, through the transform and its stores, as anybody would use it."""
    import orchard

    given = SMOL if sizes is None else sizes
    loaded = orchard.load("smollm2", dtype="float32")
    model: Any = loaded.decoder.to(device())
    length = given["length"]
    learnt, held = (
        list(models.pages(loaded.tokenizer, length, given[kind], held))
        for kind, held in (("fitted", False), ("measured", True))
    )
    plain = models.loss(model, held)
    values: dict[str, Value | Scalar] = {"smollm2.loss": Value(plain, "nats")}
    with tempfile.TemporaryDirectory(prefix="orchard-commvq-") as folder:
        for name, bits in (("2bit", 2), ("1bit", 1)):
            file = Path(folder) / f"{name}.safetensors"
            made = FitCodebooks(file=str(file), bits=bits, tokens=given["tokens"], seed=seed, **fit).apply(
                model, learnt
            )
            values[f"smollm2.increase_{name}"] = Value(models.loss(made, held, stores=True) - plain, "nats")
            if bits == 2:
                tokens = 2048
                whole = model.half().cache(batch=1, length=tokens).nbytes
                small = made.half().cache(batch=1, length=tokens).nbytes
                model.float()
                values["smollm2.cut"] = Value(1 - small / whole, f"of the bytes at {tokens} tokens")
    return values
