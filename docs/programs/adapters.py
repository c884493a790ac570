"""Adapters: load a LoRA onto a model that is in memory already, and use it for one call; the weights are shared."""

import tempfile
from pathlib import Path

import numpy as np

import orchard
from orchard import fm
from orchard.weights.adapters import Side, write_adapter

model = orchard.load("smollm2")
base = model.adapters.base
chance = np.random.default_rng(0)

# A real adapter comes out of training. This one is noise on one linear map, loud enough to be heard.
path = "stack.layers.9.mlp.down"
rows, columns = base.shapes[f"{path}.weight"]
a = chance.standard_normal((4, columns), dtype=np.float32)
b = chance.standard_normal((rows, 4), dtype=np.float32)

with tempfile.TemporaryDirectory() as folder:
    write_adapter(Path(folder) / "noise", {path: Side(a, b, 0.05)}, base)
    name = model.adapters.load(Path(folder) / "noise")

options = fm.GenerationOptions(maximum_response_tokens=24)
for adapters in ((), (name,)):
    session = orchard.Session(model=model, options=options, adapters=adapters)
    print("adapted:" if adapters else "base:", session.respond("Name a tree.").content)
print("loaded:", model.adapters.names)
