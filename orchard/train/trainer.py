"""The loop: every objective, every source, every model, one way to learn. A run is a config; what it leaves is a folder.

    trainer = Trainer.Config(model=…, objective=NextToken.Config(), source=…, steps=1000).build(folder=Path("run"), tokenizer=…)
    report = trainer.run()

The folder holds checkpoints and the Report with its curves (report.json, report.html, curves.png). `run` goes on from the last
checkpoint where there is one: the same seed and the same config then give the same weights as a run that was never interrupted,
bit for bit on one machine.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.digest import sha256
from orchard.core.errors import ConfigError, OrchardError
from orchard.core.progress import Advance, progress, silent
from orchard.core.report import Report, Value
from orchard.core.seeds import fold
from orchard.objectives.base import Objective
from orchard.objectives.lm import NextToken
from orchard.train.checkpoint import Checkpoints
from orchard.train.clip import Clip
from orchard.train.compiled import Compiled, compiled
from orchard.train.ema import EMA
from orchard.train.errors import Diverged, NothingToLearn
from orchard.train.memory import keep_freed_memory
from orchard.train.optim import AdamW
from orchard.train.parallel import Mesh, Spread, spread
from orchard.train.parallel_sums import gathered, same_everywhere
from orchard.train.recompute import Recompute, recompute
from orchard.train.schedule import Cosine
from orchard.train.shown import Kept
from orchard.train.state import DIGEST, TrainState
from orchard.train.step import DTYPES, VALUE, WEIGHT, Around, Step, Taken, named_sums
from orchard.train.stopping import Stopping
from orchard.train.watch import Watch
from orchard.train.world import World

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
        frozen: bool = True
        """Keep what is not trained, too. Without it checkpoints of adapters are small, and the same base is needed to go on."""

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
        mesh: Mesh.Config = field(default_factory=Mesh.Config)
        """How the run is cut over its processes; one process needs nothing."""
        spread: Spread.Config = field(default_factory=Spread.Config)
        recompute: Recompute.Config = field(default_factory=Recompute.Config)
        compile: bool = False
        """Let torch compile each kind of block once. Blocks it cannot compile run as they are, and the Report says why."""
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
            if hasattr(self.source, "check_fits"):  # a source that writes its own batches has something to say to this
                self.source.check_fits(self.objective, self.micro)
            if self.schedule is None and self.steps is not REQUIRED:
                self.schedule = Cosine.Config(warmup=max(1, self.steps // 50), steps=self.steps, floor=0.1)

    def __init__(
        self,
        cfg: Config,
        *,
        folder: Path,
        tokenizer: Any = None,
        with_model: nn.Module | None = None,
        with_objective: Objective | None = None,
        device: torch.device | str = "cpu",
        here: World | None = None,
        around: Around = nullcontext,
    ) -> None:
        """`with_model`: one that is there already; `with_objective`: one that needs more than its config (such as a teacher);
        `here`: this process among several (`with world() as here`), whose device it then is; `around`: entered around the passes
        of every step, for what a step's micro-batches share."""
        self.config = cfg
        self.folder = Path(folder)
        self.here = here or World(device=torch.device(device))
        self.device = self.here.device
        self.mesh: Mesh = cfg.mesh.build(here=self.here)
        same_everywhere(cfg, self.here)
        self.model = self._model(with_model).to(self.device)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError("nothing in this model can be trained", hint="add an adapter, or unfreeze some weights")
        self.watch = Watch(
            self.model,
            device=self.device,
            dtype=cfg.dtype,
            steps=cfg.steps,
            processes=self.here.size,
            measure=self.here.first,
        )
        # Compiled blocks are recomputed, recomputed blocks are sharded: this is the order in which they wrap each other.
        self.compiled: Compiled | None = compiled(self.model) if cfg.compile else None
        recompute(self.model, cfg.recompute)
        spread(self.model, self.mesh, cfg.spread)
        self.objective: Objective = with_objective if with_objective is not None else cfg.objective.build()
        self.source = self._share(cfg.source.build(tokenizer=tokenizer))
        self.held_out = {name: self._share(one.build(tokenizer=tokenizer)) for name, one in cfg.held_out.items()}
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
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
            mesh=self.mesh if self.here.size > 1 else None,
            around=around,
        )
        self.kept = Kept(self.folder)

    def run(self, told: Iterable[Told] = ()) -> Report:
        """Learn until the last step. Ctrl-C or SIGTERM end it after a step, with a checkpoint to go on from. All processes of a
        run come here; only the first one tells anybody anything."""
        if self.device.type == "cpu":
            keep_freed_memory()
        self.resume()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.watch.begin()
        begun, before = time.perf_counter(), self.seconds
        told = list(told) if self.here.first else []
        try:
            with Stopping() as stopping, self._bar() as advance:
                advance(self.done)
                while self.done < self.config.steps:
                    point, stop = self._next(stopping)
                    self.seconds = before + time.perf_counter() - begun
                    for one in told:
                        one(self.done, point)
                    advance(note=self.watch.words(self.done, point), left=self.watch.left(self.done))
                    stop = stop or (self.here.size == 1 and stopping.asked is not None)
                    self._save_if_due(stop)
                    if stop:
                        raise KeyboardInterrupt
        finally:
            self.close()
        self.checkpoints.wait()
        report = self.report()
        if self.here.first:
            self.kept(lambda: report, last=True)
        return report

    def _bar(self) -> AbstractContextManager[Advance]:
        if not self.here.first:
            return nullcontext(silent)
        return progress("training", total=self.config.steps, unit="steps")

    # One step -----------------------------------------------------------------------------------------------------------

    def _next(self, stopping: Stopping) -> tuple[dict[str, float], bool]:
        """What a step adds to the curves, and whether it is to be the last: all processes have to agree on that, so that it is
        decided by what they exchange in a step anyway."""
        try:
            batch = next(self.source)
        except StopIteration:
            raise NothingToLearn(
                f"the source ended after {self.done} of {self.config.steps} steps",
                hint="repeat it (Repeat without epochs), or ask for fewer steps",
            ) from None
        asked = self.here.size > 1 and stopping.asked is not None
        taken = self.step(batch.to(self.device), self.done, tokens=batch.tokens, stop=asked)
        if not taken.sound:
            raise self._diverged(taken, batch)
        if self.ema is not None:
            self.ema.update(self.model)
        self.tokens += taken.tokens
        means = self.objective.curves(taken.weight, taken.parts)
        point = self.watch.note(self.done, taken, taken.tokens, means, batch)
        self.done += 1
        if hasattr(self.source, "moved"):
            self.source.moved(self.done)
        if self.held_out and (self.done % self.config.held_out_every == 0 or self.done == self.config.steps):
            point |= self._measure()
        return point, taken.stop

    def _diverged(self, taken: Taken, batch: Any) -> Diverged:
        named = ", ".join(taken.norm.bad[:3]) + (" …" if len(taken.norm.bad) > 3 else "")
        what = f"gradients of {named} are not finite" if taken.norm.bad else f"the loss is {taken.loss}"
        rows = list(dict.fromkeys(row for each in gathered(self._suspects(batch), self.here) for row in each))
        whose = f"; row {' and row '.join(rows[:3])}" if rows else ""
        return Diverged(
            f"step {self.done + 1}: {what} (a batch of {len(batch)} rows, {batch.tokens} targets{whose})",
            hint=f"the last checkpoint ({self._kept()}) is as it was: lower the learning rate, clip more, or look at this batch",
        )

    def _suspects(self, batch: Any) -> list[str]:
        """The rows whose own loss is no number, by where they come from: what to look at first."""
        origins = getattr(batch, "origins", ())
        found = []
        with torch.no_grad():
            for row in range(len(batch)):
                loss = self.step.loss(batch.part(row, row + 1).to(self.device))
                if not math.isfinite(float(loss.value)):
                    found.append(f"{row} of share {self.mesh.data_rank}" if self.mesh.data > 1 else f"{row}")
                    if row < len(origins) and origins[row]:
                        found[-1] += f" ({origins[row]})"
        return found if len(found) < len(batch) else []  # all of them: it is the model, not a row

    def _kept(self) -> str:
        with suppress(OrchardError):  # the one that is being written counts if it can be written
            self.checkpoints.wait()
        step = self.checkpoints.latest()
        return "there is none yet" if step is None else f"after step {step}"

    @torch.no_grad()
    def _measure(self) -> dict[str, float]:
        """The loss on what is held out, always on the same batches."""
        found: dict[str, float] = {}
        self.model.eval()
        for name, source in self.held_out.items():
            source.begin(0)
            value = weight = 0.0
            with self.step.around():
                for _, batch in zip(range(self.config.held_out_batches), source, strict=False):
                    totals = self.step.totals(named_sums(self.step.loss(batch.to(self.device))))
                    value, weight = value + totals[VALUE], weight + totals[WEIGHT]
            points = self.watch.curves.setdefault(f"held out, {name}", [])
            points.append([self.done, value / weight if weight else None])
            if weight:
                found[f"held out, {name}"] = value / weight
        return found

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
        return TrainState(self.model, self.optimizer, self.ema, extra, frozen=self.config.save.frozen)

    def save(self, *, wait: bool = False) -> None:
        self.checkpoints.save(self.done, self.state(), wait=wait)

    def resume(self) -> bool:
        """Go on from the last checkpoint; False where there is none."""
        if self.checkpoints.latest() is None:
            return False
        known = {DIGEST: digest(self.config)}
        state = TrainState(self.model, self.optimizer, self.ema, known, frozen=self.config.save.frozen)
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
        values |= self.watch.values()
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
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = [f"{name}: {count}" for name, count in self.source.counts().items() if count]
        if self.here.size > 1:
            cut = self.config.mesh
            split = f"tensor {cut.tensor}, expert {cut.expert}, track {cut.track}, pipeline {cut.pipeline}"
            notes.append(f"{self.here.size} processes: data {self.mesh.data}, {split}")
        if self.compiled is not None:
            notes += [f"not compiled: {name}: {why}" for name, why in self.compiled.reasons.items()]
        return notes

    # Inside -------------------------------------------------------------------------------------------------------------

    def _share(self, source: Any) -> Any:
        """This process's rows of a source; one that writes its own batches is told which model to write with."""
        if self.mesh.data > 1:
            source.shard(self.mesh.data_rank, self.mesh.data)
        if hasattr(source, "follow"):
            source.follow(self.model, self.device)
        return source

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
            if self.here.first and not last:
                self.kept(self.report)


def digest(cfg: Trainer.Config) -> str:
    """Of all that the weights depend on, but for rounding: how often a run is saved and looked at is not among it, nor how it is
    cut over processes or memory. So a run may go on with other processes than it began with."""
    cut: dict[str, Any] = {"mesh": Mesh.Config(), "spread": Spread.Config(), "recompute": Recompute.Config()}
    same = cfg.clone(save=Saving.Config(), held_out={}, held_out_every=1, held_out_batches=1, compile=False, **cut)
    return sha256(json.dumps(same.to_dict(), sort_keys=True).encode()).hex()
