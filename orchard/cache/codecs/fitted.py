"""What codecs were fitted to a model with: one safetensors file beside the model, tensors by layer, and whose model it is.

    write_fitted(path, "codebooks", {0: {"keys": …}, 1: …}, model="3f…")
    tensors = read_fitted(path, "codebooks", layer=0, model="3f…")

Files are read once, and again when they have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from orchard.core.errors import BadFile
from orchard.core.files import atomic_write

KIND = "orchard-kv"
AGAIN = "fit it to this model again"
Layers = dict[int, dict[str, Tensor]]


def write_fitted(path: Path | str, kind: str, layers: Mapping[int, Mapping[str, Tensor]], *, model: str) -> None:
    """Write a whole file or none. `model` tells the model from another."""
    tensors = {
        f"layers.{layer}.{name}": tensor.detach().cpu().contiguous().clone()
        for layer, each in layers.items()
        for name, tensor in each.items()
    }
    with atomic_write(Path(path)) as file:
        file.write(save(tensors, {"kind": f"{KIND}-{kind}", "model": model}))


def read_fitted(path: Path | str, kind: str, *, layer: int, model: str) -> dict[str, Tensor]:
    """The tensors of one layer by name; `BadFile` where the file is missing, damaged, of another kind, or of another model."""
    layers, found, whose = _whole(path)
    if found != f"{KIND}-{kind}":
        raise BadFile(f"{path} holds no {kind}", hint=AGAIN)
    if whose != model:
        raise BadFile(f"{path} was fitted to another model ({whose or 'of no name'}, not {model})", hint=AGAIN)
    if layer not in layers:
        raise BadFile(f"{path} has nothing for layer {layer}", hint=AGAIN)
    return layers[layer]


def model_of(path: Path | str, kind: str) -> str:
    """Which model a file was fitted to."""
    _, found, whose = _whole(path)
    if found != f"{KIND}-{kind}":
        raise BadFile(f"{path} holds no {kind}", hint=AGAIN)
    return whose


def layers_of(path: Path | str) -> Layers:
    """Everything in a file, by layer."""
    return _whole(path)[0]


def _whole(path: Path | str) -> tuple[Layers, str, str]:
    place = Path(path)
    try:
        facts = place.stat()
    except OSError:
        raise BadFile(f"{place} is not there: keys and values are kept by what is in it", hint=AGAIN) from None
    return _read(place, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> tuple[Layers, str, str]:
    layers: Layers = {}
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                words, layer, name = key.split(".", 2)
                if words != "layers":
                    raise ValueError(f"a tensor called {key}")
                tensor = file.get_tensor(key)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise ValueError(f"{key} holds values that are not finite")
                layers.setdefault(int(layer), {})[name] = tensor
    except (SafetensorError, ValueError, OSError) as error:
        raise BadFile(f"{path} is damaged: {error}", hint=AGAIN) from None
    return layers, facts.get("kind", ""), facts.get("model", "")
