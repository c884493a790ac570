"""A field that a config.json leaves out has the reference's default, or is refused by name: never another value."""

from __future__ import annotations

import pytest

from orchard.core.config_text import diff
from orchard.core.errors import OrchardError
from orchard.models.zoo import config, families

KINDS = sorted(
    set(families()) - {"gemma3", "parallel_tracks"}
)  # the last is a family of our own: there is no reference
# Published checkpoints of Gemma 3 that also see leave out most of their text part's fields.
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_never_silently_different(kind: str) -> None:
    from transformers import AutoConfig

    full = {name: value for name, value in AutoConfig.for_model(kind).to_dict().items() if value is not None}
    expected, refused = config(full), []
    for name in full.keys() - {"model_type"}:
        rest = {key: value for key, value in full.items() if key != name}
        try:
            assert not diff(expected, config(rest)), name
        except OrchardError as error:
            assert name in str(error), f"{name}: {error}"
            refused.append(name)
    assert {"hidden_size", "num_hidden_layers"} <= set(refused)


def test_a_sparse_text_part_has_the_defaults_of_its_family() -> None:
    from transformers import Gemma3Config

    full = Gemma3Config(text_config=dict(GEMMA3_4B["text_config"])).text_config.to_dict()
    assert not diff(config(full), config(GEMMA3_4B))
