"""AFM 2025, on the server: parallel tracks that meet seldom, and windows between global layers without positions.

Apple Intelligence Foundation Language Models, Tech Report 2025 (arXiv 2507.13575) has a server model of parallel tracks: several
small transformers read the same tokens, each with its own attention, its own MLPs or experts, and exchange what they have made
only after every few layers (the paper on tracks alone: arXiv 2602.07306). A model of L layers that is cut over devices by
tensor parallelism waits for the others 2 L times for every token, one with blocks of D layers L / D times. Of every four layers
three have a window and rotary positions, and the fourth sees everything and knows no positions.

Here small models of characters of a made-up language (`_afm_text.py`) learn from the same text: one with a single way through,
one with four tracks and exactly as many parameters, one with windows between global layers. The model with tracks, and one with
everything at once (tracks, windows, a mixture of experts in every other layer), then run in four processes: messages are counted
where torch sends them; scores, gradients and answers are held against those of one process. By Orchard's own parts: `Tracks`,
`keep_tracks`, `ParallelTracks`, `LocalGlobal`, the trainer's step and mesh, the engine.

What differs from the paper: models of less than a million weights with one head in each track; a window of 64; float32; no
mixture in the models that are compared for their loss. What tracks have made is averaged, as in the paper on tracks. Nothing is
timed: four processes on two cores say nothing about waiting. Shared keys and values, two bits, the block codec and drafts are in
the study `afm-2025-device`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.models.language import Decoder
from orchard.nn.tracks_apart import talk
from orchard.studies import _afm_ground as ground_
from orchard.studies import _server_apart as apart
from orchard.studies import _server_shapes as shapes
from orchard.studies._afm_ground import Ground
from orchard.studies._server_shapes import Shape
from orchard.studies.harness import Outcome


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    shape: Shape
    deep_loss: bool = False
    """Whether the deeper cut and the whole server model are trained too."""
    processes: int = 4
    rows: int = 4
    """Texts that several processes read."""
    answer: int = 24
    """Tokens that they answer with."""


SCALES = {
    "small": Scale(shape=Shape(ground=Ground(dim=64, layers=8, rows=8, length=96, steps=240, rate=4e-3, held_out=128))),
    "full": Scale(
        shape=Shape(ground=Ground(dim=256, layers=8, rows=64, length=128, steps=2500, rate=2e-3, held_out=1024)),
        deep_loss=True,
    ),
}
CLAIMS = [
    Claim("syncs", "Blocks of two layers meet L / D times in a forward pass", "syncs_tracks", Bound("==", 4)),
    Claim("syncs-tensor", "… where tensor parallelism adds up 2 L times", "syncs_tensor", Bound("==", 16)),
    Claim("syncs-fewer", "… which is three quarters less", "syncs_fewer", Bound("==", 0.75), "syncs_tensor"),
    Claim("syncs-fewer-deep", "Blocks of four layers: seven eighths less", "syncs_fewer_deep", Bound("==", 0.875)),
    Claim("weights", "Both models have exactly as many parameters", "weights_ratio", Bound("==", 1.0)),
    Claim("loss", "Tracks cost little: loss over that of the single way", "tracks_loss_ratio", Bound("<=", 1.03)),
    Claim("processes", "T processes give the scores of one", "processes_scores_off", Bound("<=", 1e-5)),
    Claim("processes-slopes", "… its gradients", "processes_slopes_off", Bound("<=", 1e-5)),
    Claim("processes-answers", "… and its answers", "processes_answers_different", Bound("==", 0)),
    Claim(
        "server",
        "The same with windows and mixtures of experts in the tracks",
        "server_scores_off",
        Bound("<=", 1e-5),
    ),
    Claim("server-answers", "… answers too", "server_answers_different", Bound("==", 0)),
    Claim(
        "length",
        "At four times the length that was learnt from, windows lose less than global layers with positions",
        "far_loss_ratio",
        Bound("<=", 0.9),
        "far_loss_global",
    ),
    Claim("length-bytes", "… and keep less of what they have read", "far_kv_bytes_ratio", Bound("<=", 0.45)),
]
NOTES = [
    "Losses are nats a character on the same held-out text. Text that is learnt from never repeats.",
    "Messages are sums over processes in one forward pass, counted where torch sends them.",
    "Scores are compared in float32 between four processes and one; gradients by parameter, as a share of the largest number.",
    "Keys and values: what the stores of one sequence take at four times the length, counted in bytes.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    shape = size.shape
    one = ground_.base(shape.ground, seed, "the model with one way through", shapes.one_way(shape))
    tracks = ground_.base(shape.ground, seed, "the model with tracks", shapes.with_tracks(shape, shape.depth))
    near = ground_.base(shape.ground, seed, "the model with windows", shapes.near_and_far(shape))
    values = compared(size, one, tracks, seed) | lengths(size, one, near, seed) | in_processes(size, one, tracks, seed)
    if size.deep_loss:
        values |= deeper(size, one, seed)
    return Outcome(
        values=values,
        notes=NOTES,
        reasons=reasons(values),
        config={**asdict(size), "device": ground_.device().type},
    )


def compared(size: Scale, one: Decoder, tracks: Decoder, seed: int) -> dict[str, Value | Scalar]:
    """Loss and parameters of both, and meetings as the layers themselves count them."""
    ground = size.shape.ground
    losses = [ground_.loss(model, ground, seed) for model in (one, tracks)]
    weights = [sum(parameter.numel() for parameter in model.parameters()) for model in (one, tracks)]
    before = talk(tracks).meetings
    with torch.no_grad():
        tracks(next(iter(ground_.batches(ground, 1, seed, "look"))).ids)
    return {
        "tracks_loss_ratio": Value(losses[1] / losses[0], "x"),
        "loss_one_way": Value(losses[0], "nats"),
        "loss_tracks": Value(losses[1], "nats"),
        "weights_ratio": Value(weights[1] / weights[0], "x"),
        "weights": weights[1],
        "tokens": ground.tokens,
        "meetings": Value(talk(tracks).meetings - before, note="of the model in one process, in a forward pass"),
    }


def lengths(size: Scale, one: Decoder, near: Decoder, seed: int) -> dict[str, Value | Scalar]:
    """Both models at the length that they learnt from and at several times that."""
    shape = size.shape
    far = replace(
        shape.ground, length=shape.far * shape.ground.length, held_out=max(8, shape.ground.held_out // shape.far)
    )
    losses = {name: ground_.loss(model, shape.ground, seed) for name, model in (("global", one), ("near", near))}
    further = {name: ground_.loss(model, far, seed) for name, model in (("global", one), ("near", near))}
    stores = [model.cache(batch=1, length=far.length).nbytes for model in (one, near)]
    return {
        "far_loss_ratio": Value(further["near"] / further["global"], "x", note=f"at {far.length} tokens"),
        "far_loss_global": Value(further["global"], "nats", note="all layers global, with rotary positions"),
        "far_loss_windows": Value(further["near"], "nats"),
        "windows_loss_ratio": Value(losses["near"] / losses["global"], "x", note=f"at {shape.ground.length} tokens"),
        "far_kv_bytes_ratio": Value(stores[1] / stores[0], "x", note=f"stores for {far.length} tokens"),
    }


def in_processes(size: Scale, one: Decoder, tracks: Decoder, seed: int) -> dict[str, Value | Scalar]:
    """The trained models, the deeper cut and the whole server model (fresh weights) in as many processes as there are tracks."""
    shape = size.shape
    read = next(iter(ground_.batches(shape.ground, 1, seed, "processes", size.rows)))
    models = {
        "tracks": tracks,
        "one": one,
        "deep": ground_.built(shapes.with_tracks(shape, shape.deep), seed, "deep"),
        "server": ground_.built(shapes.server(shape), seed, "server"),
    }
    found = apart.measured(models, read.ids.cpu(), size.processes, size.answer)
    tensor = found.messages["one"]
    return {
        "syncs_tracks": Value(found.messages["tracks"], note=f"{shape.ground.layers} layers, blocks of {shape.depth}"),
        "syncs_tensor": Value(tensor, note="the model with one way through, cut over as many processes"),
        "syncs_deep": Value(found.messages["deep"], note=f"blocks of {shape.deep}"),
        "syncs_fewer": 1 - found.messages["tracks"] / tensor,
        "syncs_fewer_deep": 1 - found.messages["deep"] / tensor,
        "processes_scores_off": Value(found.scores["tracks"], note=f"{size.processes} processes, at most"),
        "processes_slopes_off": Value(found.slopes["tracks"], note="at most"),
        "processes_answers_different": Value(
            found.answers["tracks"], note=f"of 2, {size.answer} tokens, by the engine"
        ),
        "processes_kv_share": Value(found.stores["tracks"], "x", note="that one process keeps"),
        "server_scores_off": Value(found.scores["server"], note="fresh weights, at most"),
        "server_slopes_off": Value(found.slopes["server"], note="at most"),
        "server_answers_different": Value(found.answers["server"], note=f"of 2, {size.answer} tokens"),
        "server_kv_share": Value(found.stores["server"], "x", note="that one process keeps"),
        "server_syncs": found.messages["server"],
    }


def deeper(size: Scale, one: Decoder, seed: int) -> dict[str, Value | Scalar]:
    """What the deeper cut costs, and the whole server model."""
    ground = size.shape.ground
    base = ground_.loss(one, ground, seed)
    deep = ground_.base(ground, seed, "the deeper cut", shapes.with_tracks(size.shape, size.shape.deep))
    whole = ground_.base(ground, seed, "the server model", shapes.server(size.shape))
    return {
        "deep_loss_ratio": Value(ground_.loss(deep, ground, seed) / base, "x"),
        "server_loss_ratio": Value(
            ground_.loss(whole, ground, seed) / base, "x", note="it has more parameters: experts"
        ),
        "server_weights": sum(parameter.numel() for parameter in whole.parameters()),
    }


def reasons(values: dict[str, Any]) -> dict[str, str]:
    """What is known about claims that may fail at this size."""

    def number(name: str) -> float:
        return float(Value.of(values[name]).value or 0)

    found = {}
    if number("tracks_loss_ratio") > 1.03:
        found["loss"] = (
            "A track has one head and a quarter of the channels, and waits for two layers before it hears of the others: at this "
            "width that is felt."
        )
    if number("far_loss_ratio") > 0.9:
        found["length"] = (
            "What helps to foretell a character of this language is near by, so that a model whose positions are wrong far away "
            "loses less than ten per cent there."
        )
    return found
