"""A whole run as one config: what to begin from, what to learn from, and what to leave.

    cfg = Run.Config(train=Trainer.Config(…), base="smollm2", adapter=Adapter.Config(r=32))
    report = cfg.build(folder=Path("run")).start()

The folder then holds `model` (a Hugging Face folder with its tokenizer; where no such folder can describe it, the file
`model.orchard`) or `adapter` (PEFT, signed by its base), the Report, and the checkpoints that the same config goes on from. On
several processes each of them builds and starts the same config inside `with world() as here`, and gives `here` along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, OrchardError
from orchard.core.report import Report
from orchard.recipes.adapter import Adapter
from orchard.recipes.begin import BASE, Begun, begin, objective_of, vocab_named
from orchard.recipes.files import refuse_missing
from orchard.recipes.finish import describe, result_of, write_model, write_sides
from orchard.recipes.same import keep_config, refuse_other
from orchard.session.place import device_of
from orchard.train.shown import JSON as REPORT
from orchard.train.shown import Kept
from orchard.train.trainer import Told, Trainer
from orchard.train.world import World


class Run(Configurable):
    """`start` may be called once. `trainer`, `begun` (model, tokenizer, base) and `result` (where it goes) are there before."""

    @config
    class Config(BaseConfig):
        train: Trainer.Config = REQUIRED
        base: str | None = None
        """A model of the library, a GGUF file or a Hugging Face folder to begin from. None: train.model, with fresh weights."""
        tokenizer: str | None = None
        """The model whose tokenizer is used, or bytes; None: the base's."""
        rewrites: list[BaseConfig] = field(default_factory=list)
        """Changes of the base's tree before its weights are read: each builds a function from tree to tree."""
        after: list[BaseConfig] = field(default_factory=list)
        """Changes of the base once its weights are read: each builds a function from model to model."""
        adapter: Adapter.Config | None = None
        """Side paths that are trained instead of the base, which is frozen."""
        teacher: str | None = None
        """A model to learn from; base: the base as it was, without side paths."""
        reference: bool = False
        """Keep the model as it was, to stay near: with an adapter the base itself, otherwise a copy."""
        device: str = "auto"

        def wire(self) -> None:
            tree: Any = None if self.train is REQUIRED else self.train.model
            if self.base is None:
                self._check_fresh(tree)
                if tree.vocab is REQUIRED:
                    assert self.tokenizer is not None
                    tree.vocab = vocab_named(self.tokenizer)
            elif tree is not None:
                raise ConfigError("a run has a base and a tree for fresh weights", hint="leave base or train.model out")
            if self.adapter is not None and self.after:
                raise ConfigError(
                    "an adapter is for a base as it is, and this one is changed", hint="leave one of them out"
                )
            if self.adapter is not None and self.train is not REQUIRED:
                self.train.save.frozen = False  # the base is read again from its own files

        def _check_fresh(self, tree: Any) -> None:
            if tree is None:
                raise ConfigError("a run has no model to begin from", hint="set base, or train.model for fresh weights")
            if self.tokenizer is None:
                raise ConfigError("a fresh model has no tokenizer", hint="name a model whose it is, or use bytes")
            if self.adapter is not None:
                raise ConfigError("an adapter beside fresh weights", hint="set base to the model to adapt")
            if self.rewrites:
                raise ConfigError("rewrites are for a base's tree", hint="change train.model itself")
            if self.after:
                raise ConfigError(
                    "there is no base to change after its weights are read", hint="change train.model itself"
                )
            if self.teacher == BASE:
                raise ConfigError("there is no base to learn from", hint="set teacher to a model's name")

    def __init__(self, cfg: Config, *, folder: Path, here: World | None = None) -> None:
        self.config = cfg
        self.folder = Path(folder).absolute()
        self.here = here
        self._bad_rows = ""
        refuse_other(self.folder, cfg)
        for source in (cfg.train.source, *cfg.train.held_out.values()):
            refuse_missing(source)
        self.device = torch.device(here.device) if here is not None else device_of(cfg.device)
        self.begun: Begun = begin(cfg, self.device, alone=here is None or here.size == 1)
        self.obstacle = "" if cfg.adapter is not None else describe(self.begun)
        """Why the model cannot be written as a folder that others read; empty where it can."""
        runtime: dict[str, Any] = {} if here is None else {"here": here}
        self.trainer = cfg.train.build(
            folder=self.folder,
            tokenizer=self.begun.tokenizer,
            with_model=self.begun.model,
            with_objective=objective_of(cfg, self.begun, self.device),
            device=self.device,
            **runtime,
        )

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.here is None or self.here.first

    @property
    def result(self) -> Path:
        """Where the model or the adapter is, once the run is done."""
        return result_of(self.config, self.folder, self.begun)

    def start(self, told: Iterable[Told] = ()) -> Report:
        """Train, from the last checkpoint where there is one, and write the result. Of a run that is done, the Report."""
        done = self._done()
        if done is not None:
            return done
        if self.first:
            keep_config(self.folder, self.config)
        report = self.trainer.run([*told, self._look])
        report.config = self.config.to_dict()
        report.notes += self._left_out()
        if self.first:
            report.notes.append(self._write())
            Kept(self.folder)(lambda: report, last=True)  # in place of the trainer's own, with what was written
        return report

    def _done(self) -> Report | None:
        if not self.result.exists() or self.trainer.checkpoints.latest() != self.config.train.steps:
            return None
        try:
            report = Report.load(self.folder / REPORT)
        except (OrchardError, OSError):
            return None
        if report.config != self.config.to_dict():
            return None
        self.trainer.resume()  # whoever asks for the model gets the trained one
        self.trainer.close()
        return report

    def _look(self, number: int, point: Mapping[str, float]) -> None:
        """After the last step, while the source still knows what was wrong with rows."""
        summary = getattr(self.trainer.source, "summary", None)
        if number == self.config.train.steps and summary is not None:
            self._bad_rows = summary()

    def _left_out(self) -> list[str]:
        """Rows that were no good, in words; of those that a thread has read ahead, only the first may be among the words."""
        bad, words = self.trainer.source.counts().get("bad", 0), self._bad_rows
        if not bad or not words:
            return []
        same = words.startswith(f"{bad:,} rows")
        return [words if same else f"{bad:,} rows were left out; the first: {words.partition('; the first: ')[2]}"]

    def _write(self) -> str:
        """Write the result, if it is not there; what to say of it. It appears under its name when it is whole."""
        if self.obstacle:
            return f"the weights are in the last checkpoint only: {self.obstacle}"
        if not self.result.exists():
            weights = self.trainer.checkpoints.weights(average=self.config.train.ema is not None)
            if self.config.adapter is None:
                write_model(self.begun, weights, self.result)
            else:
                write_sides(self.config, self.begun, weights, self.result)
            if weights.parent == self.folder:  # put together from several processes' files, for this alone
                weights.unlink(missing_ok=True)
        return f"the {self.result.name} is in {self.result}"
