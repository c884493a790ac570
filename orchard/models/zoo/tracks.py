"""Models with parallel tracks (arXiv 2507.13575, 2602.07306), and with windows between global layers that know no positions.

No such checkpoint is public, so the words of the config are our own. `num_hidden_layers` counts layers of the stack; with
`num_tracks` each of them is that many tracks of `track_depth` layers, and heads, widths and experts are those of one track.
`layer_types` has one entry for each layer of a track, from the first meeting to the last. `sliding_mixer` says what the layers
with a window are: "attention", or "rattention" (arXiv 2506.15545), which has two more tensors a layer.
"""

from __future__ import annotations

from orchard.core.errors import BadFile
from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import Json, count, flag, layers, refused
from orchard.models.zoo.parts import FULL, MAX_LAYERS, attention, decoder, layer_kinds, mixture, mlp, norm
from orchard.models.zoo.qwen import EXPERT_KEYS
from orchard.nn.attention import RAttention
from orchard.nn.stack import Block, Layer
from orchard.nn.tracks import in_tracks

NAME = "parallel_tracks"
MOST_TRACKS = 1024
MIXERS = ("attention", "rattention")
NORMS = {f"mixer.{norm}.weight": f"self_attn.{norm}.weight" for norm in ("near_norm", "far_norm")}


def tracks(hf: Json) -> Decoder.Config:
    meets = hf.get("num_tracks") is not None
    width, depth = (count(hf, "num_tracks"), count(hf, "track_depth")) if meets else (1, 1)
    total = count(hf, "num_hidden_layers") * depth
    if width > MOST_TRACKS or total * width > MAX_LAYERS:
        raise BadFile(f"{width:,} tracks of {total:,} layers are more than any model has", hint="the config is damaged")
    combine = hf.get("track_combine", "mean")
    if combine not in ("mean", "sum"):
        raise refused("track_combine", combine, "mean or sum")
    experts = layers(hf, "expert_layers")
    kinds = layer_kinds({**hf, "num_hidden_layers": total}, lambda _: FULL)
    blocks = [_block(hf, kind, mixes=place in experts) for place, kind in enumerate(kinds)]
    stack: list[Layer] = [*in_tracks(blocks, width, depth, combine)] if meets else [*blocks]
    return decoder(hf, stack)


def _block(hf: Json, kind: str, *, mixes: bool) -> Block.Config:
    normed = flag(hf, "use_qk_norm")
    mixer = attention(hf, kind=kind, q_norm=norm(hf) if normed else None, k_norm=norm(hf) if normed else None)
    if kind == FULL and not flag(hf, "rope_on_full_attention", True):
        mixer.rotary = None
    sliding = hf.get("sliding_mixer", "attention")
    if sliding not in MIXERS:
        raise refused("sliding_mixer", sliding, " or ".join(MIXERS))
    if kind != FULL and sliding == "rattention":
        mixer = mixer.derive(RAttention)
    renormalize = flag(hf, "norm_topk_prob", True)
    inner = mixture(hf, hidden_dim=count(hf, "moe_intermediate_size"), renormalize=renormalize) if mixes else mlp(hf)
    return Block.Config(mixer_norm=norm(hf), mixer=mixer, mlp_norm=norm(hf), mlp=inner)


FAMILIES = (Family(NAME, tracks, gguf="", hf_keys=NORMS, hf_expert_keys=EXPERT_KEYS),)
