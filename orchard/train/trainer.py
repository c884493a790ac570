"""The loop: every objective, every source, every model, one way to learn. A run is a config; what it leaves is a folder.

    trainer = Trainer.Config(model=…, objective=NextToken.Config(), source=…, steps=1000).build(folder=Path("run"), tokenizer=…)
    report = trainer.run()

The folder holds checkpoints and the Report with its curves. `run` goes on from the last checkpoint where there is one: the same
seed and the same config then give the same weights as a run that was never interrupted, bit for bit on one machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.digest import sha256
from orchard.core.errors import ConfigError, OrchardError
from orchard.core.progress import progress
from orchard.core.report import Report, Value
from orchard.core.seeds import fold
from orchard.objectives.base import Objective
from orchard.objectives.lm import NextToken
from orchard.train.checkpoint import Checkpoints
from orchard.train.clip import Clip
from orchard.train.ema import EMA
from orchard.train.errors import Diverged, NothingToLearn
from orchard.train.optim import AdamW
from orchard.train.schedule import Cosine
from orchard.train.state import DIGEST, TrainState
from orchard.train.step import DTYPES, Step, Taken
from orchard.train.stopping import Stopping
from orchard.train.watch import Watch

Told = Callable[[int, Mapping[str, float]], None]
"""Told of every step: its number and what it adds to the curves."""


class Saving(Configurable):
    """When checkpoints are written."""

    @config
    class Config(BaseConfig):
        every: int = 200
        """Steps between two; the last step is always kept."""
        keep: int = 2
        keep_every: int | None = None
        """Steps whose checkpoints are kept for good."""

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


class Trainer(Configurable):
    """`run` may be called once."""

    @config
    class Config(BaseConfig):
        model: BaseConfig | None = None
        """None: the model is given when this is built."""
        objective: BaseConfig = field(default_factory=NextToken.Config)
        source: BaseConfig = REQUIRED
        """Batches: rows of all processes together."""
        steps: int = REQUIRED
        micro: int | None = None
        """Rows at a time, so that a batch need not fit into memory; None: all of them."""
        optim: BaseConfig = field(default_factory=AdamW.Config)
        schedule: BaseConfig | None = None
        """None: warm up for a fiftieth of the steps, then a cosine down to a tenth."""
        clip: Clip.Config = field(default_factory=Clip.Config)
        ema: EMA.Config | None = None
        dtype: str = "float32"
        """What is computed in; weights and their updates stay what they are."""
        seed: int = 0
        save: Saving.Config = field(default_factory=Saving.Config)
        held_out: dict[str, BaseConfig] = field(default_factory=dict)
        """Sources of which the loss is measured and nothing is learnt."""
        held_out_every: int = 200
        held_out_batches: int = 16

        def wire(self) -> None:
            if self.steps is not REQUIRED and self.steps < 1:
                raise ConfigError(f"{self.steps} steps", hint="use at least one")
            if self.dtype not in DTYPES:
                raise ConfigError(f"dtype is {self.dtype!r}", hint="use one of " + ", ".join(DTYPES))
            if self.micro is not None and self.micro < 1:
                raise ConfigError(f"micro is {self.micro}", hint="use at least one row, or None")
            if self.schedule is None and self.steps is not REQUIRED:
                self.schedule = Cosine.Config(warmup=max(1, self.steps // 50), steps=self.steps, floor=0.1)

    def __init__(
        self,
        cfg: Config,
        *,
        folder: Path,
        tokenizer: Any = None,
        model: nn.Module | None = None,
        objective: Objective | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`model`: one that is there already; `objective`: one that needs more than its config (a teacher, a reference)."""
        self.config = cfg
        self.folder = Path(folder)
        self.device = torch.device(device)
        self.model = self._model(model).to(self.device)
        self.objective: Objective = objective if objective is not None else cfg.objective.build()
        self.source = cfg.source.build(tokenizer=tokenizer)
        self.held_out = {name: one.build(tokenizer=tokenizer) for name, one in cfg.held_out.items()}
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not trained:
            raise ConfigError("nothing in this model can be trained", hint="add an adapter, or unfreeze some weights")
        self.optimizer: torch.optim.Optimizer = cfg.optim.build(named_parameters=trained)
        self.ema: EMA | None = cfg.ema.build(model=self.model) if cfg.ema is not None else None
        self.checkpoints = Checkpoints(self.folder, keep=cfg.save.keep, keep_every=cfg.save.keep_every)
        self.done = 0
        self.tokens = 0
        self.seconds = 0.0
        assert cfg.schedule is not None
        self.step = Step(
            self.model,
            self.objective,
            self.optimizer,
            cfg.schedule.build(),
            cfg.clip.build(),
            micro=cfg.micro,
            dtype=cfg.dtype,
            seed=cfg.seed,
        )
        self.watch = Watch(self.model, device=self.device)

    def run(self, told: Iterable[Told] = ()) -> Report:
        """Learn until the last step. Ctrl-C or SIGTERM end it after a step, with a checkpoint to go on from."""
        self.resume()
        self.folder.mkdir(parents=True, exist_ok=True)
        begun, before = time.perf_counter(), self.seconds
        try:
            with Stopping() as stopping, progress("training", total=self.config.steps, unit="steps") as advance:
                advance(self.done)
                while self.done < self.config.steps:
                    point = self._next()
                    self.seconds = before + time.perf_counter() - begun
                    for one in told:
                        one(self.done, point)
                    advance(note=self.watch.words(self.done, point))
                    self._save_if_due(stopping.asked is not None)
                    if stopping.asked is not None:
                        raise KeyboardInterrupt
        finally:
            self.close()
        self.checkpoints.wait()
        return self.report()

    # One step -----------------------------------------------------------------------------------------------------------

    def _next(self) -> dict[str, float]:
        try:
            batch = next(self.source)
        except StopIteration:
            raise NothingToLearn(
                f"the source ended after {self.done} of {self.config.steps} steps",
                hint="repeat it (Repeat without epochs), or ask for fewer steps",
            ) from None
        taken = self.step(batch.to(self.device), self.done)
        if not taken.sound:
            raise self._diverged(taken, batch)
        if self.ema is not None:
            self.ema.update(self.model)
        tokens = batch.tokens
        self.tokens += tokens
        point = self.watch.note(self.done, taken, tokens, self.objective.curves(taken.weight, taken.parts))
        self.done += 1
        if self.held_out and (self.done % self.config.held_out_every == 0 or self.done == self.config.steps):
            self._measure()
        return point

    def _diverged(self, taken: Taken, batch: Any) -> Diverged:
        named = ", ".join(taken.norm.bad[:3]) + (" …" if len(taken.norm.bad) > 3 else "")
        what = f"gradients of {named} are not finite" if taken.norm.bad else f"the loss is {taken.loss}"
        return Diverged(
            f"step {self.done + 1}: {what} (a batch of {len(batch)} rows, {batch.tokens} targets)",
            hint=f"the last checkpoint ({self._kept()}) is as it was: lower the learning rate, clip more, or look at this batch",
        )

    def _kept(self) -> str:
        with suppress(OrchardError):  # the one that is being written counts if it can be written
            self.checkpoints.wait()
        step = self.checkpoints.latest()
        return "there is none yet" if step is None else f"after step {step}"

    @torch.no_grad()
    def _measure(self) -> None:
        """The loss on what is held out, always on the same batches."""
        self.model.eval()
        for name, source in self.held_out.items():
            source.begin(0)
            value = weight = 0.0
            for _, batch in zip(range(self.config.held_out_batches), source, strict=False):
                loss = self.step.loss(batch.to(self.device))
                value, weight = value + float(loss.value), weight + float(loss.weight)
            points = self.watch.curves.setdefault(f"held out, {name}", [])
            points.append([self.done, value / weight if weight else None])

    # Coming and going ---------------------------------------------------------------------------------------------------

    def state(self) -> TrainState:
        extra = {
            DIGEST: digest(self.config),
            "step": self.done,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "source": self.source.state(),
            "curves": self.watch.curves,
        }
        return TrainState(self.model, self.optimizer, self.ema, extra)

    def save(self, *, wait: bool = False) -> None:
        self.checkpoints.save(self.done, self.state(), wait=wait)

    def resume(self) -> bool:
        """Go on from the last checkpoint; False where there is none."""
        if self.checkpoints.latest() is None:
            return False
        state = TrainState(self.model, self.optimizer, self.ema, {DIGEST: digest(self.config)})
        self.checkpoints.load(state)
        extra = state.extra
        self.done, self.tokens, self.seconds = extra["step"], extra["tokens"], extra["seconds"]
        self.source.restore(extra["source"])
        self.watch.curves = extra["curves"]
        return True

    def close(self) -> None:
        for source in (self.source, *self.held_out.values()):
            source.close()

    def report(self) -> Report:
        """What came of it, with all curves."""
        curves = self.watch.curves
        values: dict[str, Any] = {
            "steps": self.done,
            "tokens": self.tokens,
            "loss": Value(curves["loss"][-1], note="of the last step"),
            "tokens/s": Value(
                self.tokens / self.seconds if self.seconds else 0.0, unit="tokens/s", note="over all steps"
            ),
        }
        for name, points in curves.items():
            if name.startswith("held out") and points:
                values[f"loss, {name}"] = points[-1][1]
        return Report.record(
            "train",
            self.folder.name,
            values=values,
            seed=self.config.seed,
            config=self.config.to_dict(),
            series=curves,
            wall_time=round(self.seconds, 3),
            notes=[f"{name}: {count}" for name, count in self.source.counts().items() if count],
        )

    # Inside -------------------------------------------------------------------------------------------------------------

    def _model(self, given: nn.Module | None) -> nn.Module:
        if given is not None:
            return given
        if self.config.model is None:
            raise ConfigError("there is no model to train", hint="name one in the config, or give one to build()")
        torch.manual_seed(fold(self.config.seed, "model"))
        made: nn.Module = self.config.model.build()
        return made

    def _save_if_due(self, now: bool) -> None:
        last = now or self.done == self.config.steps
        if last or self.done % self.config.save.every == 0:
            self.save(wait=last)


def digest(cfg: Trainer.Config) -> str:
    """Of all that the weights depend on: how often a run is saved and looked at is not among it."""
    same = cfg.clone(save=Saving.Config(), held_out={}, held_out_every=1, held_out_batches=1)
    return sha256(json.dumps(same.to_dict(), sort_keys=True).encode()).hex()
