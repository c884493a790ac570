"""Carries a plan out: step by step, each measured, judged and kept before the next begins."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from orchard.core.batch import Batch
from orchard.core.progress import lasting, progress
from orchard.core.seeds import fold
from orchard.models.language.decoder import Decoder
from orchard.recipes.compressing.forecast import Forecast, room_for
from orchard.recipes.compressing.measure import Measured, Tasks, measured
from orchard.recipes.compressing.plan import Plan
from orchard.recipes.compressing.sizes import Scale
from orchard.recipes.compressing.step import Ground, Rounds, Step
from orchard.recipes.compressing.teach import Class, Taught, joined, teach
from orchard.recipes.compressing.texts import Texts, Wanted, texts_for
from orchard.recipes.compressing.work import RUN, Work
from orchard.session.build import Built
from orchard.session.model import Model
from orchard.text.tokenizer import Tokenizer
from orchard.train.trainer import Told
from orchard.transforms.share_kv import kv_bytes

WIDEST = 4096
"""Rows that are written together, at most."""
MOST = 32_768
"""Tokens that pass through a model at a time, at most: more makes no GPU busier."""
KEPT = 48
"""Bytes that training keeps of a token, in a layer, for each dimension, about."""


@dataclass(frozen=True)
class Settings:
    """What a run is asked for, with nothing left open."""

    tokens: int
    held: int
    looked: int
    """Tokens that transforms look at."""
    length: int
    rows: int
    batch: int
    files: tuple[str, ...]
    own: float
    reuse: int
    tasks: Tasks | None
    device: torch.device
    dtype: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """`good`: the number of the last step whose model is kept; 0: none is. `steps`: what each step left to say."""

    good: int
    steps: list[dict[str, Any]]
    stopped: str | None
    texts: Texts
    tasks: dict[str, float]
    """What the original scores."""


class Runner:
    """`run` may be called once."""

    def __init__(
        self,
        plan: Plan,
        built: Built,
        tokenizer: Tokenizer,
        source: Path,
        scale: Scale,
        foreseen: Forecast,
        work: Work,
        settings: Settings,
        tell: Any,
        told: tuple[Told, ...],
    ) -> None:
        self.plan, self.built, self.tokenizer, self.source = plan, built, tokenizer, source
        self.scale, self.foreseen, self.work, self.settings = scale, foreseen, work, settings
        self.tell, self.told = tell, told
        self.original: Decoder = built.decoder.to(settings.device).eval().requires_grad_(False)

    def run(self) -> Outcome:
        texts = self._texts()
        tasks = {} if self.settings.tasks is None else dict(self.settings.tasks(self._asked(self.original)))
        done: list[dict[str, Any]] = []
        good, stopped, model = 0, None, None
        for number, step in enumerate(self.plan.steps, 1):
            facts = self.work.done(number)
            if facts is None:
                if model is None:
                    model = self.original if number == 1 else self.work.model(number - 1, self.settings.device)
                self.tell(f"step {number} of {len(self.plan.steps)}: {step.words}")
                model, facts = self._do(number, step, model, texts)
                found = Measured.from_dict(facts["measured"])
                self._compare(step, found, done, facts)
                facts["judged"] = self._is_judged(number, found)
                facts["broken"] = self._broken(found) if facts["judged"] else None
                here = number if facts["judged"] and facts["broken"] is None else good
                self.work.keep(number, self._as_built(model), self.tokenizer, self.source, facts, here)
                self._say(facts)
            if facts["judged"] and facts["broken"] is None:
                good = number
            done.append(facts)
            if facts["broken"] is not None:
                stopped = f"{step.words}: {facts['broken']}"
                break
        return Outcome(good, done, stopped, texts, {name: float(value) for name, value in tasks.items()})

    def measure(self, model: Decoder, texts: Texts) -> Measured:
        asked = None if self.settings.tasks is None else self._asked(model)
        return measured(model, self.original, texts, self.settings.tasks, asked)

    # One step -----------------------------------------------------------------------------------------------------------

    def _do(self, number: int, step: Step, model: Decoder, texts: Texts) -> tuple[Decoder, dict[str, Any]]:
        begun = time.perf_counter()
        torch.manual_seed(fold(self.settings.seed, "step", number) % 2**31)
        looked = (
            [batch.to(self.settings.device) for batch in texts.looked_at(self.settings.looked)] if step.looks else []
        )
        transform = step.transform
        taught: Taught | None = None
        if step.lessons is not None and step.lessons.between:
            made, taught = self._by_rounds(number, step, model, looked, texts)
        else:
            with progress(step.words, total=1.0, unit="of the step") as advance:
                if step.choose is not None:
                    transform = step.choose(Ground(model, looked, self._room(number), self.work.place(number), advance))
                made = copy.deepcopy(model) if transform is None else transform.apply(model, looked, advance)
            if step.lessons is not None:
                tokens = self.foreseen.steps[number - 1].tokens
                taught = self._teach(step, made, texts, tokens, self.work.place(number) / RUN, number)
        if transform is not None:
            made = transform.finish(made)
        made = made.eval().requires_grad_(False)
        halve_vectors(made)
        found = self.measure(made, texts)
        size = self.scale(made.config.complete())
        notes = list(getattr(transform, "notes", ()))
        return made, {
            "step": step.words,
            "seconds": round(time.perf_counter() - begun, 2),
            "tokens": taught.tokens if taught else 0,
            "size": size.to_dict(),
            "measured": found.to_dict(),
            "curve": taught.curve if taught else [],
            "held_out": taught.held if taught else {},
            "notes": notes if len(notes) <= 20 else [*notes[:20], f"and {len(notes) - 20} more"],
        }

    def _by_rounds(
        self, number: int, step: Step, model: Decoder, looked: list[Batch], texts: Texts
    ) -> tuple[Decoder, Taught]:
        """Each round learns in a folder of its own: one that was interrupted goes on where it was, and earlier ones are quick."""
        transform = cast(Rounds, step.transform)
        parts = [2**place for place in range(len(transform.counts(model.config.complete())))]
        tokens = self.foreseen.steps[number - 1].tokens
        taught: list[Taught] = []

        def heal(made: Decoder, place: int) -> Decoder:
            share = max(1, round(tokens * parts[place] / sum(parts)))
            folder = self.work.place(number) / RUN / str(place + 1)
            taught.append(self._teach(step, made, texts, share, folder, f"{number}, round {place + 1}"))
            return made.requires_grad_(False)

        return transform.in_rounds(model, looked, heal), joined(taught)

    def _teach(self, step: Step, model: Decoder, texts: Texts, tokens: int, folder: Path, number: int | str) -> Taught:
        assert step.lessons is not None
        asked = self.settings
        where = Class(texts, self.tokenizer, asked.device, asked.dtype, asked.rows, self._micro(), asked.seed)
        self.tell(f"learning from {tokens:,} tokens")
        return teach(model, self.original, step.lessons, tokens, where, folder, number, self.told)

    def _micro(self) -> int | None:
        """Rows that pass through the model at a time: on a GPU as many as a quarter of its memory should hold, up to `MOST`."""
        asked, tree = self.settings, self.original.config.complete()
        if asked.device.type != "cuda":
            return None
        each = KEPT * tree.dim * len(tree.stack.layers)
        tokens = min(MOST, torch.cuda.get_device_properties(asked.device).total_memory // 4 // each)
        rows = max(1, tokens // asked.length)
        return None if rows >= asked.rows else rows

    def _room(self, number: int) -> int | None:
        if self.foreseen.budget is None:
            return None
        return room_for(self.plan, number - 1, self.scale, self.foreseen.budget)

    def _is_judged(self, number: int, found: Measured) -> bool:
        """A step that the next one is there to mend is judged together with it."""
        following = self.plan.steps[number : number + 1]
        return not (following and following[0].mending and found.all.finite)

    @staticmethod
    def _compare(step: Step, found: Measured, done: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        """Say so where a step that is there to mend has made things worse: then it has learnt too little, or too fast."""
        if step.mending and done:
            before = Measured.from_dict(done[-1]["measured"]).all.kl
            if found.all.kl > before:
                facts["notes"].append(
                    f"KL rose from {before:.4f} to {found.all.kl:.4f}: give it more tokens, or a lower lr"
                )

    def _broken(self, found: Measured) -> str | None:
        """The rule that does not hold, in words."""
        if not found.all.finite:
            return "its scores are no numbers"
        values = found.values()
        for rule in self.plan.stop:
            if not rule.holds(values):
                value = values.get(rule.measure)
                return f"{rule} does not hold: it is {'not known' if value is None else f'{value:.4g}'}"
        return None

    # Around it ----------------------------------------------------------------------------------------------------------

    def _texts(self) -> Texts:
        asked = self.settings
        learnt = -(-self.foreseen.tokens // asked.reuse)
        if any(step.looks for step in self.plan.steps):
            learnt = max(learnt, asked.looked)
        length = min(asked.length, self.original.config.context - 1)
        wanted = Wanted(learnt, asked.held, length, self._together(length), asked.files, asked.own, asked.seed)
        self.tell(f"writing text, up to {learnt + 2 * asked.held:,} tokens" if not self._written() else "text is there")
        narrow = asked.device.type == "cuda" and asked.dtype == "bfloat16"
        writer = copy.deepcopy(self.original).bfloat16() if narrow else self.original
        return texts_for(writer, self.tokenizer, wanted, self.work.text)

    def _together(self, length: int) -> int:
        """Rows that are written at once: on a GPU as many as a third of its memory holds, up to `WIDEST`."""
        asked = self.settings
        if asked.device.type != "cuda":
            return asked.batch
        each = kv_bytes(self.original.config) * (length + 1) + 16 * self.original.config.vocab
        fits = torch.cuda.get_device_properties(asked.device).total_memory // 3 // each
        return max(asked.batch // 8, min(WIDEST, fits // 64 * 64))

    def _written(self) -> bool:
        return any(self.work.text.glob("held-*.safetensors"))

    def _as_built(self, model: Decoder) -> Built:
        return replace(self.built, decoder=model)

    def _asked(self, model: Decoder) -> Model:
        return Model(self._as_built(model), self.tokenizer, name="compressed", source=self.source)

    def _say(self, facts: dict[str, Any]) -> None:
        one = facts["measured"]["all"]
        size = facts["size"]
        ratio, kl = (f"{one[name]:.4f}" if one[name] is not None else "no number" for name in ("ratio", "kl"))
        self.tell(
            f"  {size['bytes'] / 1e6:,.4g} MB, {size['bits_per_weight']:.2f} bits per weight, loss ratio {ratio}, "
            f"KL {kl}, agreement {one['agreement']:.1%}, {lasting(facts['seconds'])}"
        )
        if facts["broken"] is not None:
            self.tell(f"  {facts['broken']}")


@torch.no_grad()
def halve_vectors(model: Decoder, *, matrices: bool = False) -> None:
    """Round norms, biases and other vectors that were trained to half precision, in which files keep them; with `matrices`, all
    dense weights."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and (matrices or parameter.dim() < 2):
            half = parameter.half()
            parameter.copy_(half if bool(half.isfinite().all()) else parameter.bfloat16())
