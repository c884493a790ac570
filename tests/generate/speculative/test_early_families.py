"""Plans cut short, in every family: the same bits as a model that never had its last layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.models.language.decoder import Decoder
from orchard.ops.plan.early import early_plan, layer_count
from orchard.ops.plan.file import to_json
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.parity.families import CASES, reference, save

IDS = [5, 17, 3, 8, 41, 2, 9]


@pytest.fixture(scope="module", params=sorted(CASES))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = save(reference(request.param), tmp_path_factory.mktemp(request.param))
    with open_checkpoint(folder) as checkpoint:
        return load_decoder(checkpoint)


def test_a_plan_cut_short_is_a_model_of_fewer_layers(decoder: Decoder) -> None:
    layers = list(decoder.stack.layers)
    plan = lower(decoder)
    assert layer_count(plan) == len(layers)
    assert to_json(early_plan(plan, len(layers))) == to_json(plan)
    try:
        for count in range(1, len(layers)):
            decoder.stack.layers = torch.nn.ModuleList(layers[:count])
            early, shorter = early_plan(plan, count), lower(decoder)
            assert to_json(early) == {**to_json(shorter), "rotaries": to_json(plan)["rotaries"]}
            assert np.array_equal(NativeRunner(early).scores(IDS), NativeRunner(shorter).scores(IDS))
    finally:
        decoder.stack.layers = torch.nn.ModuleList(layers)
