"""Steps on keys and values: fewer layers that keep them, fewer bits for each; and time to get used to it."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.core.errors import UsageError
from orchard.recipes.compressing.step import Lessons, Step
from orchard.recipes.compressing.steps import step


@step
def share_kv(last: int | None = None, share: float | None = None, refine: int = 0) -> Step:
    """Let the last layers read the keys and values of the last one before them, and fit what they add. Wants `heal` next.

    last: how many layers
    share: of all layers; 0.375 unless `last` says how many
    refine: steps by which these layers learn, each by itself, what they gave before
    """
    from orchard.transforms.share_kv import ShareKV

    if last is not None and share is not None:
        raise UsageError("share-kv has both last and share", hint="give one of them")
    count = {"last": last} if last is not None else {"share": 0.375 if share is None else share}
    made = ShareKV(**count, refine=refine)
    return Step(made, sees=True, costs=(1.1, 2.0))


@step
def route_kv(p_borrow: float = 0.6, tokens: int | None = None, share: float = 0.5, lr: float = 3e-4) -> Step:
    """Train all weights while layers read earlier layers' keys and values by chance: `retain` then costs little. Before it.

    p_borrow: how likely each layer does, in each pass
    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    """
    from orchard.transforms.route_kv import RouteKV

    return Step(RouteKV(p_borrow), lessons=Lessons(share=share, tokens=tokens, lr=lr), costs=(1.0, 1.1))


@step
def retain(
    layers: Sequence[int] | None = None, every: int | None = None, share: float | None = None, fit: bool = True
) -> Step:
    """Keep the keys and values of some layers; the others read the last of them before. Wants `route-kv` before, or `heal` next.

    layers: their numbers, from 0
    every: of so many layers the first; 2 unless something else is given
    share: of all layers, evenly spread
    fit: fit what the others add to what they read now
    """
    from orchard.transforms.retain import Retain

    numbers = None if layers is None else tuple(int(layer) for layer in layers)
    made = Retain(numbers, 2 if numbers is None and every is None and share is None else every, share, fit)
    return Step(made, sees=fit, costs=(1.02, 3.0))


@step
def kv8() -> Step:
    """Keep keys and values in eight bits."""
    from orchard.transforms.kv8 import KV8

    return Step(KV8(), costs=(1.0, 1.01))


@step
def kv_int4(file: str | None = None, sinks: int = 4) -> Step:
    """Keep keys and values in four bits.

    file: what key channels need, found on text unless it is there already; none: keys are rounded as they come
    sinks: the first so many tokens stay as they are
    """
    from orchard.transforms.kv4 import KV4

    return Step(KV4(file=file, sinks=sinks), sees=file is not None, costs=(1.0, 1.03))


@step
def kv_commvq(file: str, bits: int = 2, sinks: int = 4, tokens: int = 8192) -> Step:
    """Keep keys and values in one or two bits, by codebooks in a file beside the model (arXiv 2506.18879).

    file: the codebooks, fitted on text unless they are there already
    bits: 2 or 1
    sinks: the first so many tokens stay as they are
    tokens: so many are fitted to
    """
    from orchard.transforms.fit_codebooks import FitCodebooks

    return Step(FitCodebooks(file=file, bits=bits, sinks=sinks, tokens=tokens), costs=(1.0, 1.1))


@step
def heal(tokens: int | None = None, share: float = 0.5, lr: float = 3e-4, states: float = 0.0) -> Step:
    """Train all weights, still in full precision, to say what the original says.

    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    states: how much it counts that every block gives what the original's gives
    """
    return Step(lessons=Lessons(share=share, tokens=tokens, lr=lr, states=states), mends=(0.05, 0.5))
