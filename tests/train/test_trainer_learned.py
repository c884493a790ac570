"""The loop with learned levels: resumed to the same bits, averaged, and without decay where that is asked for."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from orchard.core.config import BaseConfig
from orchard.text.tokenizer import Tokenizer
from orchard.train.ema import EMA
from orchard.train.optim import AdamW, Rules
from orchard.train.trainer import Trainer
from orchard.transforms.qat import Qat, scale_names, weight_names
from tests.generate.conftest import make_tokenizer
from tests.train.training import run_config, weights

QAT = Qat(bits=2, group=8, embedding=4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def made(folder: Path, tokenizer: Tokenizer, name: str, **changes: Any) -> Trainer:
    plain: Any = run_config(folder, tokenizer).model
    optim = AdamW.Config(lr=1e-2, rules=Rules.Config(no_decay=["*"], not_hidden=["*log_scale"]))
    settings = {"model": QAT.trained(plain), "optim": optim, "ema": EMA.Config(decay=0.9), "micro": 2} | changes
    trainer: Trainer = run_config(folder, tokenizer, **settings).build(folder=folder / name, tokenizer=tokenizer)
    return trainer


def test_a_run_goes_on_to_the_same_bits_and_is_packed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = made(tmp_path, tokenizer, "whole")
    begun = weights(whole)
    losses = whole.run().series["loss"]
    assert losses[-1] < losses[0]

    def stop(number: int, point: Any) -> None:
        if number == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, tokenizer, "parts").run(told=[stop])
    rest = made(tmp_path, tokenizer, "parts")
    rest.run()
    mine, theirs = weights(rest), weights(whole)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {"embedding.log_scale", "embedding.sign", "stack.layers.0.mixer.q.log_scale"} <= mine.keys()
    moved = [name for name in scale_names(whole.model) if not torch.equal(begun[name], theirs[name])]
    assert moved == scale_names(whole.model)
    assert torch.equal(begun["embedding.sign"], theirs["embedding.sign"])
    assert whole.ema is not None and rest.ema is not None
    assert all(torch.equal(rest.ema.averages[name], value) for name, value in whole.ema.averages.items())
    ids = torch.arange(12)[None]
    whole.model.eval()
    with whole.ema.applied(whole.model), torch.no_grad():
        averaged = QAT.finish(whole.model)
        assert torch.equal(averaged(ids), whole.model(ids))
    with torch.no_grad():
        assert not torch.equal(averaged(ids), whole.model(ids))
    assert BaseConfig.from_dict(averaged.config.to_dict()) == averaged.config


def test_decay_can_be_kept_from_what_is_quantised(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """By names, as a recipe would say it."""
    student: Any = QAT.trained(run_config(tmp_path, tokenizer).model).build()
    usual = Rules.Config()
    rules = usual.clone(
        no_decay=[*usual.no_decay, *weight_names(student), *scale_names(student)],
        not_hidden=[*usual.not_hidden, "*log_scale"],
    )
    groups = rules.build().split(student.named_parameters())
    assert not [name for group in groups if group.decay for name in group.names]
    assert not [name for group in groups if group.matrix for name in group.names if name.endswith("log_scale")]
    by_rule = usual.build().split(student.named_parameters())
    pulled = [name for group in by_rule if group.decay for name in group.names]
    assert any(name.endswith("log_scale") for name in pulled), "the usual rules would pull scales towards one"
