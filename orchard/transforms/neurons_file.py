"""A model's neurons in a file of records, and the way back from a record to a row of numbers.

A neuron of a feed-forward layer is a row of gate and up and a column of down, with their biases: all of it is one record, so that
one read brings it (row-column bundling, arXiv 2312.11514). Weights may be packed by any format, row by row; a column of down is
a row here, and scales lie beside their codes. What a layer always needs (its predictor, the bias of down) is one record more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchard.cache.experts import OtherModel, Records, Source, room, write_records
from orchard.cache.experts.layout import PAGES
from orchard.core.config import BaseConfig
from orchard.core.errors import BadFile, OrchardError, UsageError
from orchard.nn.formats import Format, Plain
from orchard.nn.tensors import dense_tensor
from orchard.transforms.activity import Predictor, relu_layers

KIND = "neurons"
FIXED = " fixed"
"""After a layer's path: the record of what it always needs."""
CHUNK = 256
"""Records that are read before they are unpacked together."""
MAPS = ("gate", "up", "down")


def write_neurons(
    model: nn.Module,
    path: Path | str,
    predictors: Mapping[str, Predictor] | None = None,
    *,
    format: BaseConfig | None = None,
    page: int | None = None,
) -> None:
    """Write the neurons of all ReLU layers; the file appears whole or not at all.

    `format` packs the rows (None: as plain numbers of the model's type). `page`: records begin at multiples of so many bytes
    (None: `usual_page`).
    """
    layers, cfg = relu_layers(model), Plain.Config() if format is None else format
    unknown = sorted(set(predictors or {}) - set(layers))
    if unknown:
        raise UsageError(f"a predictor for {unknown[0]}, which is no ReLU layer", hint="fit predictors to this model")
    sources = []
    for name, layer in layers.items():
        bundle = _bundle(layer, cfg.build())
        own = usual_page(sum(part[0].nbytes for part in bundle.values())) if page is None else page
        sources.append(Source(name, layer.config.hidden_dim, _row_of(bundle), page=own))
        sources.append(Source(name + FIXED, 1, _always(_fixed(layer, (predictors or {}).get(name)))))
    facts = {"kind": KIND, "format": json.dumps(cfg.to_dict(), sort_keys=True), "model": identity(model)}
    write_records(path, sources, facts)


def usual_page(used: int) -> int:
    """The largest page that leaves at most an eighth of what is read unused, or the smallest there is: a disk reads whole pages,
    but neurons of small models, or packed ones, are smaller than those."""
    fitting = [page for page in PAGES if -used % page <= used / 8]
    return max(fitting, default=min(PAGES))


def identity(model: Any) -> str:
    """Tells a model from another by what stays in memory beside its neurons: the norms."""
    from hashlib import sha256

    found = sha256()
    for name, value in sorted(model.named_parameters()):
        if "norm" in name:
            found.update(name.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _bundle(layer: Any, packer: Format) -> dict[str, Tensor]:
    """All rows of a layer, by the name that they have in a record: [units, ...]."""
    parts: dict[str, Tensor] = {}
    for name in MAPS:
        linear = getattr(layer, name, None)
        if linear is None:
            continue
        weight = dense_tensor(linear, "weight").detach().cpu()
        packed = packer.pack((weight.mT if name == "down" else weight).contiguous())
        parts |= {f"{name}.{key}": value for key, value in packed.items()}
    for name in MAPS[:2]:
        bias = getattr(getattr(layer, name, None), "bias", None)
        if bias is not None:
            parts[f"{name}.bias"] = bias.detach().float().cpu()[:, None]
    return parts


def _row_of(bundle: Mapping[str, Tensor]) -> Any:
    return lambda unit: {name: part[unit] for name, part in bundle.items()}


def _always(fixed: Mapping[str, Tensor]) -> Any:
    return lambda _: fixed


def _fixed(layer: Any, predictor: Predictor | None) -> dict[str, Tensor]:
    parts = {"units": torch.tensor([layer.config.hidden_dim])}
    if layer.down.bias is not None:
        parts["down.bias"] = layer.down.bias.detach().float().cpu()
    if predictor is not None:
        parts |= {f"activity.{name}": value.detach().float().cpu() for name, value in predictor.named_parameters()}
    return parts


@dataclass(frozen=True)
class NeuronLayer:
    """One layer of an open file: neurons by number, as rows of float32."""

    records: Records
    layer: int
    fixed: dict[str, Tensor]
    format: Format

    @classmethod
    def open(cls, path: Path | str, name: str, *, direct: bool = False) -> NeuronLayer:
        records = Records.open(path, direct=direct)
        if records.facts.get("kind") != KIND:
            raise OtherModel(f"{records.path.name} holds no neurons", hint="make one with write_neurons")
        names = [layer.name for layer in records.layers]
        if name not in names or name + FIXED not in names:
            raise OtherModel(f"{records.path.name} has no neurons of {name}", hint="write the neurons of this model")
        return cls(records, names.index(name), records.get(names.index(name + FIXED), 0), format_of(records))

    @property
    def units(self) -> int:
        return self.records.layers[self.layer].units

    @property
    def bundle_bytes(self) -> int:
        """Bytes from a record to the next: what a neuron costs to read."""
        return self.records.layers[self.layer].stride

    @cached_property
    def parts(self) -> dict[str, slice]:
        """Where the maps and biases of a neuron lie in its row: gate, up and down first, each as wide as the model."""
        arrays = self.records.layers[self.layer].arrays
        maps = [name for name in MAPS if any(key.startswith(f"{name}.") for key in arrays)]
        dim = self._unpack("down", torch.zeros(1, self.bundle_bytes, dtype=torch.uint8)).shape[-1]
        widths = dict.fromkeys(maps, dim) | {key: 1 for key in arrays if key.endswith(".bias")}
        found, at = {}, 0
        for name, width in widths.items():
            found[name] = slice(at, at + width)
            at += width
        return found

    @property
    def width(self) -> int:
        return max(part.stop for part in self.parts.values())

    def predictor(self) -> Predictor | None:
        names = ("a", "b", "bias")
        if not all(f"activity.{name}" in self.fixed for name in names):
            return None
        made = Predictor(*(self.fixed[f"activity.{name}"].clone() for name in names))
        return made.requires_grad_(False).eval()

    def read(self, units: Any, *, join: bool = True) -> Tensor:
        """Rows [units, width] of neurons by number, in this order. `join`: neighbours are read together."""
        stage, pieces = self._stage, []
        for start in range(0, len(units), CHUNK):
            some = units[start : start + CHUNK]
            for at, many in _runs(some) if join else ((at, 1) for at in range(len(some))):
                self.records.read(self.layer, int(some[at]), stage[at : at + many].view(-1), many)
            pieces.append(self._rows(stage[: len(some)]))
        return torch.cat(pieces) if pieces else torch.empty(0, self.width)

    @cached_property
    def _stage(self) -> Tensor:
        """Where records land before they are unpacked; one reader at a time."""
        return room(self.bundle_bytes, CHUNK)

    def _rows(self, records: Tensor) -> Tensor:
        rows = torch.empty(len(records), self.width)
        views = self.records.layers[self.layer].views(records)
        for name, place in self.parts.items():
            rows[:, place] = views[name] if name.endswith(".bias") else self._unpack(name, records)
        return rows

    def _unpack(self, name: str, records: Tensor) -> Tensor:
        views = self.records.layers[self.layer].views(records)
        packed = {
            key.removeprefix(f"{name}."): part
            for key, part in views.items()
            if key.startswith(f"{name}.") and not key.endswith(".bias")
        }
        return self.format.unpack(packed, torch.float32)


def _runs(units: Any) -> list[tuple[int, int]]:
    """Stretches of neighbours: where each begins, and how many they are."""
    found: list[tuple[int, int]] = []
    for at, unit in enumerate(units):
        if found and units[found[-1][0]] + found[-1][1] == unit:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((at, 1))
    return found


def format_of(records: Records) -> Format:
    try:
        cfg = BaseConfig.from_dict(json.loads(str(records.facts.get("format"))))
        made = cfg.build()
    except (ValueError, OrchardError) as error:
        raise BadFile(f"{records.path.name}: no format of that kind is known", hint="write the file again") from error
    if not isinstance(made, Format):
        raise BadFile(f"{records.path.name}: {type(made).__name__} is no format", hint="write the file again")
    return made
