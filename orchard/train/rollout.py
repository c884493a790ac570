"""Rollouts: a source of answers that the model itself has just written, judged, in groups.

    rows of prompts → rounds: `prompts` questions with `group` answers each → batches (`GroupBatch`) to learn from

A round is asked of a writer (`rollout_writer`), comes back finished and is given out as one batch, or as `minibatches` batches
`epochs` times over: several updates from the same answers, which the clipped ratios of the objective allow for. Then the next
round is asked, with the weights of that moment. With `lag` rounds are asked ahead: the loop is the same, its data is older.

The trainer says which model it is (`follow`) and when its weights have changed (`moved`). What is sampled depends on the weights,
the seed, the round, the question's place in it and the answer's place in its group; a state holds what has been written and not
learnt from yet. All processes of a run write their share of every round and then tell each other, so that each knows all
of it: a state is the same whoever took it, and batches are those that one process alone would make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import torch
import torch.distributed as dist

from orchard.core.batch import GroupBatch
from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import ConfigError, TemplateError, UnsupportedPair, UsageError
from orchard.core.seeds import fold
from orchard.data.errors import BadSample, Tally, at_least
from orchard.data.order import Permutation, nothing
from orchard.data.prompts import prompt_ids
from orchard.data.source import Row, Stage, State, needed
from orchard.train.parallel_sums import gathered
from orchard.train.rollout_groups import Group, Question, group_from_json, group_to_json, laid_in_rows
from orchard.train.rollout_rewards import BadReward, Reward, numbers
from orchard.train.rollout_runners import obstacle
from orchard.train.rollout_writer import EngineWriter, Manner, Writer
from orchard.train.world import World


class Rollouts(Stage[GroupBatch]):
    """`GroupBatch`es. `last` are the groups of the newest round, to look at."""

    @config
    class Config(BaseConfig):
        source: BaseConfig = REQUIRED
        """Rows to be answered: `Jsonl.Config(form="prompts")`, repeated."""
        reward: BaseConfig = REQUIRED
        prompts: int = 8
        """Questions of a round, of all processes together."""
        group: int = 8
        """Answers to each."""
        max_tokens: int = 256
        """Of an answer; fewer where the model's context ends before."""
        temperature: float = 1.0
        """The objective has to be told the same."""
        stop: list[str] = field(default_factory=list)
        """Texts that end an answer, besides the tokenizer's end tokens. What spelled one is learnt, and not judged."""
        epochs: int = 1
        """How often a round is learnt from."""
        minibatches: int = 1
        """Into how many batches it is cut, by whole groups, in another order each time."""
        lag: int = 0
        """Rounds that are asked for ahead of time."""
        chat: bool = True
        """Prompts that are texts are put as `orchard respond` would put them; False: they are texts that go on."""
        variables: dict[str, Any] = field(default_factory=dict)
        """What else the chat template may ask for."""
        multiple: int = 16
        """Rows are as wide as the longest of a batch, rounded up to a multiple of this."""
        seed: int = 0
        on_bad: str = "stop"
        """`stop` at a prompt that cannot be answered (no room for a single token, say), or `skip` and count it."""
        writer: BaseConfig = field(default_factory=EngineWriter.Config)

        def wire(self) -> None:
            for name in ("prompts", "group", "max_tokens", "epochs", "minibatches", "multiple"):
                at_least(name, getattr(self, name), 1)
            at_least("lag", self.lag, 0)
            if not 0 < self.temperature < float("inf"):
                raise ConfigError(
                    f"temperature is {self.temperature}",
                    hint="use a number above 0: answers that are always the likeliest cannot be compared",
                )
            if self.prompts % self.minibatches:
                raise ConfigError(
                    f"{self.prompts} prompts do not go into {self.minibatches} minibatches",
                    hint="use a multiple of them",
                )

        def check_fits(self, objective: BaseConfig, micro: int | None) -> None:
            """Refuse a run that would learn something else than was written, and not say so."""
            told = getattr(objective, "temperature", self.temperature)
            if told != self.temperature:
                raise ConfigError(
                    f"answers are sampled at temperature {self.temperature} and learnt at {told}",
                    hint="set source.temperature and objective.temperature to the same",
                )
            if micro is not None and micro % self.group:
                raise ConfigError(
                    f"micro-batches of {micro} rows cut groups of {self.group} answers in two",
                    hint="use a multiple of the group: answers are compared within it",
                )

    def __init__(self, cfg: Config, *, tokenizer: Any = None) -> None:
        names = (
            "prompts",
            "group",
            "max_tokens",
            "temperature",
            "stop",
            "epochs",
            "minibatches",
            "lag",
            "chat",
            "seed",
        )
        settings = {name: getattr(cfg, name) for name in names}
        super().__init__([cfg.source.build(tokenizer=tokenizer)], Tally(cfg.on_bad), **settings)
        self.cfg = cfg
        self.tokenizer: Any = needed(tokenizer, "Rollouts")
        self.reward: Reward = cfg.reward.build()
        manner = Manner(cfg.max_tokens, cfg.temperature, tuple(cfg.stop))
        self.writer: Writer = cfg.writer.build(tokenizer=self.tokenizer, manner=manner, score=self._score)
        self.rank, self.world = 0, 1
        self.last: list[Group] = []
        self._model: Any = None
        self._device = torch.device("cpu")
        self._objectives: int | None = None
        self.version = 0
        self.rounds = 0
        """Rounds that were given out, or are being."""
        self._epoch = self._begun = self._given = self._asked = 0
        self._ready: deque[list[Group]] = deque()
        self._counted: dict[str, int] = {}

    # What the trainer says ------------------------------------------------------------------------------------------------

    def follow(self, model: Any, device: torch.device | str) -> None:
        """The model that is trained, and that writes."""
        missing = obstacle(model)
        if missing:
            raise UnsupportedPair(
                f"rollouts with {missing}", hint="use mesh.data, with shard=True where memory is short"
            )
        self._model, self._device = model, torch.device(device)
        self.writer.follow(model, self._device)

    def moved(self, step: int) -> None:
        """The weights have had so many updates."""
        self.version = step
        self.writer.moved(step)

    def shard(self, rank: int, world: int) -> Rollouts:
        """From now on write and give only what is the share of one process of `world`."""
        if not 0 <= rank < world:
            raise UsageError(f"process {rank} of {world}", hint="processes are counted from 0")
        if (self.cfg.prompts // self.cfg.minibatches) % world:
            raise ConfigError(
                f"{self.cfg.prompts} prompts in {self.cfg.minibatches} minibatches do not go into {world} processes",
                hint="use a multiple of both: a group stays on one process",
            )
        self.rank, self.world = rank, world
        return self

    # Batches --------------------------------------------------------------------------------------------------------------

    def __next__(self) -> GroupBatch:
        if self._given == 0:
            self._next_round()
        epoch, part = divmod(self._given, self.cfg.minibatches)
        size = self.cfg.prompts // self.cfg.minibatches
        order: Any = range(self.cfg.prompts)
        if self.cfg.minibatches > 1:
            order = Permutation(self.cfg.prompts, self.cfg.seed, "rollout", self._epoch, self.rounds, epoch)
        groups = [self.last[order[place]] for place in range(part * size, (part + 1) * size)]
        self._given = (self._given + 1) % (self.cfg.epochs * self.cfg.minibatches)
        longest, share = max(group.longest for group in groups), size // self.world
        width = -(-longest // self.cfg.multiple) * self.cfg.multiple
        mine = groups[self.rank * share : (self.rank + 1) * share]
        return laid_in_rows(mine, width=width, version=self.version)

    def _next_round(self) -> None:
        while self._asked + len(self._ready) <= self.cfg.lag:
            questions = self._questions()
            if questions is None:
                break
            share = self.cfg.prompts // self.world
            self.writer.ask(questions[self.rank * share : (self.rank + 1) * share])
            self._asked += 1
        if not self._ready and not self._asked:
            raise StopIteration
        self.last = self._ready.popleft() if self._ready else self._taken()
        self.rounds += 1
        answers = [answer for group in self.last for answer in group.answers]
        self._count("rounds", 1)
        self._count("answers", len(answers))
        self._count("answers cut off", sum(answer.finish == "length" for answer in answers))
        self._count("groups without a difference", sum(group.even for group in self.last))

    def _taken(self) -> list[Group]:
        """The next round of the writer, from all processes, in the order of its questions."""
        groups, self._asked = self.writer.take(), self._asked - 1
        if self.world == 1:
            return groups
        here = World(rank=dist.get_rank(), size=dist.get_world_size(), device=self._device)
        note = {"rank": self.rank, "groups": [group_to_json(group) for group in groups]}
        shares = {
            each["rank"]: each["groups"] for each in gathered(note, here)
        }  # some processes share one rank of the data
        return [group_from_json(group) for rank in sorted(shares) for group in shares[rank]]

    # Questions ------------------------------------------------------------------------------------------------------------

    def _questions(self) -> list[Question] | None:
        """Those of the next round; None where the prompts have come to an end."""
        if self._model is None:
            raise UsageError("nobody said which model writes the answers", hint="call follow(model, device) first")
        found: list[Question] = []
        while len(found) < self.cfg.prompts:
            try:
                row: Row = next(self.sources[0])
            except StopIteration:
                if not self._begun and not found:
                    raise UsageError(*nothing(self.sources[0]), hint="look at on_bad, and at the files") from None
                return None
            try:
                ids = self._ids(row)
            except (BadSample, TemplateError, UsageError) as error:
                assert self.tally is not None
                self.tally.add(error)
                continue
            number = len(found)
            seeds = (fold(self.cfg.seed, "rollout", self._epoch, self._begun, number, m) for m in range(self.cfg.group))
            found.append(Question(number, tuple(ids), row, tuple(seeds)))
        self._begun += 1
        return found

    def _ids(self, row: Row) -> list[int]:
        if "messages" not in row.data and "prompt" not in row.data:
            raise BadSample(
                "the row has no question",
                reason="no-form",
                place=row.place,
                hint='read with Jsonl.Config(form="prompts")',
            )
        ids = prompt_ids(self.tokenizer, row, chat=self.cfg.chat, variables=self.cfg.variables)
        context = self._model.config.context
        if not ids or len(ids) >= context:
            why = f"{len(ids):,} tokens of a context of {context:,} leave no room for an answer" if ids else "no tokens"
            raise BadSample(f"the prompt has {why}", reason="no-room", place=row.place)
        return ids

    def _score(self, question: Question, text: str, ids: tuple[int, ...]) -> tuple[float, ...]:
        place = question.row.place or f"prompt {question.number}"
        try:
            found = numbers(self.reward, self.reward(question.row.data, text, ids), place)
        except BadSample as error:
            if not error.place:
                error.place, error.message = place, f"{place}: {error.message}"
            raise
        if self._objectives is not None and len(found) != self._objectives:
            raise BadReward(
                f"{type(self.reward).__name__} gave {len(found)} numbers for an answer to {place}, and {self._objectives} before",
                hint="give every answer as many",
            )
        self._objectives = len(found)
        return found

    # Coming and going -----------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        return super().counts() | self._counted

    def close(self) -> None:
        self.writer.close()
        super().close()

    def state(self) -> State:
        while self._asked:  # what is under way is waited for: its weights will be gone
            self._ready.append(self._taken())
        return super().state()

    def _own(self) -> State:
        kept = [self.last] if self._given else []
        return {
            "epoch": self._epoch,
            "begun": self._begun,
            "rounds": self.rounds,
            "given": self._given,
            "version": self.version,
            "counted": dict(self._counted),
            "held": [[group_to_json(group) for group in groups] for groups in [*kept, *self._ready]],
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        self._reset(int(state["epoch"]))
        self._begun, self.rounds, self._given = (int(state[name]) for name in ("begun", "rounds", "given"))
        self._counted = {str(name): int(number) for name, number in state["counted"].items()}
        self._ready.extend([group_from_json(group) for group in groups] for groups in state["held"])
        if self._given:
            self.last = self._ready.popleft()
        self.moved(int(state["version"]))

    def _reset(self, epoch: int) -> None:
        for _ in range(self._asked):
            self.writer.take()
        self._epoch, self._begun, self.rounds, self._given, self._asked = epoch, 0, 0, 0, 0
        self._ready, self._counted, self.last = deque(), {}, []

    def _count(self, name: str, number: int) -> None:
        self._counted[name] = self._counted.get(name, 0) + number
