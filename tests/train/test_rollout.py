"""Rollouts: a model learns from what it wrote itself; what was written is exactly what the law of its weights gave."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.batch import IGNORED, GroupBatch
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.data import BadSample, StateError
from orchard.data.source import Row
from orchard.models.language.decoder import Decoder
from orchard.objectives import LeaveOneOut, PolicyGradient
from orchard.objectives.logprobs import token_log_probs
from orchard.ops.kernels.native import library, why_not
from orchard.text.tokenizer import Tokenizer
from orchard.train.rollout import Rollouts
from orchard.train.rollout_groups import Group, Question, Written, group_from_json, group_to_json, laid_in_rows
from orchard.train.rollout_rewards import Length, Matches
from orchard.train.rollout_runners import RUNNERS
from orchard.train.rollout_writer import RolloutFailed, Writer
from orchard.train.trainer import Saving, Trainer
from tests.generate.conftest import Scripted, make_decoder, make_tokenizer
from tests.train.rolling import ASKED, rollouts, run_config, small_model
from tests.train.training import weights

LONGER = [{"prompt": text} for text in ("the and", "a", "bb ab thing", "12")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def made(folder: Path, tokenizer: Tokenizer, name: str = "run", **changes: Any) -> Trainer:
    trainer: Trainer = run_config(folder, tokenizer, **changes).build(folder=folder / name, tokenizer=tokenizer)
    return trainer


def model_of(tokenizer: Tokenizer, context: int = 64) -> Decoder:
    torch.manual_seed(3)
    model: Decoder = small_model(tokenizer.vocab_size, context).build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # so that tokens differ in how likely they are
    return model


def following(cfg: Rollouts.Config, tokenizer: Tokenizer, model: Any) -> Rollouts:
    source: Rollouts = cfg.build(tokenizer=tokenizer)
    source.follow(model, "cpu")
    return source


def same(one: GroupBatch, other: GroupBatch) -> bool:
    pairs = [(one.batch.ids, other.batch.ids), (one.behaviour, other.behaviour), (one.rewards, other.rewards)]
    return all(np.array_equal(a, b) for a, b in pairs)


# Learning ------------------------------------------------------------------------------------------------------------------


def test_a_fresh_model_learns_a_task_from_rewards_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    report = made(tmp_path, tokenizer).run()
    reward = report.series["reward"]
    assert np.mean(reward[:3]) < 0.2 and np.mean(reward[-5:]) > 0.8
    assert report.series["ratio"] == pytest.approx([1.0] * 45, abs=1e-4)
    assert report.series["staleness"] == [0.0] * 45 and report.series["clipped"] == [0.0] * 45
    assert "answers: 2880" in report.notes


def test_leave_one_out_and_several_updates_a_round_learn_it_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    objective = PolicyGradient.Config(aggregate=LeaveOneOut.Config())
    source = {"prompts": 8, "group": 16, "epochs": 2, "minibatches": 2}
    report = made(tmp_path, tokenizer, objective=objective, source=source, steps=60).run()
    assert np.mean(report.series["reward"][-4:]) > 0.8 > 0.2 > np.mean(report.series["reward"][:4])
    assert report.series["staleness"] == [0.0, 1.0, 2.0, 3.0] * 15
    assert "rounds: 15" in report.notes
    off = [abs(ratio - 1) for ratio in report.series["ratio"]]
    assert max(off[::4]) < 1e-4 < max(off[3::4])


# Exactness -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [{}, {"epochs": 2, "minibatches": 2}, {"lag": 2}, {"runner": "alone"}])
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(
    tmp_path: Path, tokenizer: Tokenizer, source: dict[str, Any]
) -> None:
    reward = Matches.Config(pattern="[a-z]")
    source = source | {"group": 4, "max_tokens": 3, "temperature": 0.8, "reward": reward}
    whole = made(tmp_path, tokenizer, "whole", steps=7, source=source)
    wanted = whole.run()
    assert sum(map(abs, wanted.series["advantage"])) > 1

    def stop(number: int, point: Any) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, tokenizer, "parts", steps=7, source=source).run(told=[stop])
    rest = made(tmp_path, tokenizer, "parts", steps=7, source=source)
    found = rest.run()
    assert found.series["loss"] == wanted.series["loss"] and found.series["reward"] == wanted.series["reward"]
    assert found.series["staleness"] == wanted.series["staleness"] and found.notes == wanted.notes
    ours, theirs = weights(rest), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = made(tmp_path, tokenizer, "other", steps=7, source=source | {"seed": 1}).run()
    assert other.series["loss"] != wanted.series["loss"]


@pytest.mark.parametrize("runner", ["together", "alone"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probabilities_are_those_of_the_law_that_was_sampled_from(
    tmp_path: Path, tokenizer: Tokenizer, runner: str, temperature: float
) -> None:
    model = model_of(tokenizer)
    cfg = rollouts(tmp_path, runner=runner, rows=LONGER, prompts=4, max_tokens=9, reward=Length.Config(most=9))
    source = following(cfg.clone(temperature=temperature), tokenizer, model)
    for step in range(2):
        batch: GroupBatch = next(source).to("cpu")
        counted = batch.batch.targets != IGNORED
        with torch.no_grad():
            own = token_log_probs(model, batch.batch, temperature=temperature)
        assert counted.sum() > 32 * 6
        assert (own - batch.behaviour)[counted].abs().max() < 1e-4
        assert batch.versions is not None and batch.versions.tolist() == [step] * 32
        with torch.no_grad():  # nothing that was worked out with the old weights may be used again
            for parameter in model.parameters():
                parameter.mul_(1.3)
        source.moved(step + 1)


@pytest.mark.skipif(library() is None, reason=why_not())
@pytest.mark.parametrize("runner", ["plan", "auto"])
def test_a_plan_of_the_present_weights_writes_nearly_the_same(
    tmp_path: Path, tokenizer: Tokenizer, runner: str
) -> None:
    model = model_of(tokenizer)
    cfg = rollouts(tmp_path, runner=runner, rows=LONGER, max_tokens=9, temperature=0.7, reward=Length.Config(most=9))
    source = following(cfg, tokenizer, model)
    for step in range(2):
        batch: GroupBatch = next(source).to("cpu")
        counted = batch.batch.targets != IGNORED
        with torch.no_grad():
            own = token_log_probs(model, batch.batch, temperature=0.7)
            for parameter in model.parameters():
                parameter.mul_(1.1)
        off = (own - batch.behaviour)[counted].abs()
        assert off.max() > 1e-5 and off.mean() < 0.05  # the native engine rounds
        source.moved(step + 1)


def test_what_is_sampled_does_not_depend_on_how_many_at_a_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model, settings_ = model_of(tokenizer), {"rows": LONGER, "max_tokens": 6, "reward": Length.Config(most=9)}
    wanted = next(following(rollouts(tmp_path, **settings_), tokenizer, model))
    for runner, slots in (("alone", 64), ("together", 7), ("together", 64)):
        cfg = rollouts(tmp_path, runner=runner, **settings_)
        cfg.writer.slots = slots  # type: ignore[attr-defined]
        found = next(following(cfg, tokenizer, model))
        assert np.array_equal(found.batch.ids, wanted.batch.ids)
        assert found.behaviour == pytest.approx(wanted.behaviour, abs=1e-5)
    members = wanted.batch.ids.reshape(8, 8, -1)
    assert all(len({row.tobytes() for row in group}) > 1 for group in members), "members of a group differ"


def test_stores_with_windows_can_be_used_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    window = Store.Config(policy=Window.Config(window=4, sinks=1))
    model = make_decoder(tokenizer.vocab_size, stores=(Store.Config, window.clone))
    found = []
    for runner, slots in (("alone", 64), ("together", 5)):
        cfg = rollouts(tmp_path, runner=runner, rows=LONGER, prompts=4, max_tokens=6, reward=Length.Config(most=9))
        cfg.writer.slots = slots  # type: ignore[attr-defined]
        found.append(next(following(cfg, tokenizer, model)))
    assert np.array_equal(found[0].batch.ids, found[1].batch.ids)
    assert found[0].behaviour == pytest.approx(found[1].behaviour, abs=1e-4)


def test_a_prompt_longer_than_a_call_is_read_in_pieces(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = model_of(tokenizer), [{"prompt": "xyz" * 15}, {"prompt": "q"}]
    settings_ = {"rows": rows, "max_tokens": 4, "reward": Length.Config(most=9)}
    wanted = next(following(rollouts(tmp_path, **settings_), tokenizer, model))
    monkeypatch.setattr("orchard.train.rollout_runners.COLUMNS", 10)
    found = next(following(rollouts(tmp_path, **settings_), tokenizer, model))
    assert np.array_equal(found.batch.ids, wanted.batch.ids)
    assert found.behaviour == pytest.approx(wanted.behaviour, abs=1e-5)


def test_sampling_leaves_the_model_as_it_was(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = next(following(rollouts(tmp_path), tokenizer, model)).to("cpu")
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    PolicyGradient.Config().build()(model, batch).value.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# States --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 2), st.integers(0, 7))
def test_a_state_goes_on_with_the_very_next_batch(
    tmp_path_factory: pytest.TempPathFactory, epochs: int, minibatches: int, lag: int, taken: int
) -> None:
    folder, tokenizer = tmp_path_factory.mktemp("state"), make_tokenizer()
    cfg = rollouts(folder, prompts=4, group=2, epochs=epochs, minibatches=minibatches, lag=lag)
    model = model_of(tokenizer)
    source = following(cfg, tokenizer, model)

    def moved(step: int) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(0.01)
        source.moved(step)

    for step in range(taken):
        next(source)
        moved(step + 1)
    state = json.loads(json.dumps(source.state()))
    again = following(cfg, tokenizer, model)
    again.restore(state)
    for step in range(taken, taken + 4):
        one, other = next(source), next(again)
        assert same(one, other) and np.array_equal(one.ages, other.ages)  # type: ignore[arg-type]
        moved(step + 1)
        again.moved(step + 1)
    assert source.counts() == again.counts()


def test_a_round_is_given_whole_in_every_epoch_and_groups_stay_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = following(rollouts(tmp_path, group=3, epochs=3, minibatches=4), tokenizer, model_of(tokenizer))
    orders = []
    for _ in range(3):
        groups = [next(source).groups.tolist() for _ in range(4)]
        assert all(len(batch) == 6 and batch[:3] == [batch[0]] * 3 for batch in groups)
        orders.append([group for batch in groups for group in batch[::3]])
        assert sorted(orders[-1]) == list(range(8))
    assert len({tuple(order) for order in orders}) > 1


def test_states_of_other_settings_and_damaged_ones_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    source = following(rollouts(tmp_path, minibatches=2), tokenizer, model)
    next(source)
    state = source.state()
    with pytest.raises(StateError, match="group"):
        following(rollouts(tmp_path, minibatches=2, group=4), tokenizer, model).restore(state)
    state["held"][0][0]["answers"][0]["ids"] = 3
    with pytest.raises(StateError, match="damaged"):
        following(rollouts(tmp_path, minibatches=2), tokenizer, model).restore(state)


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
ANSWERS = st.lists(IDS, min_size=1, max_size=3)


@given(IDS, ANSWERS, st.integers(0, 9), st.integers(1, 3))
def test_groups_survive_json_and_rows_hold_what_groups_say(
    prompt: list[int], answers: list[list[int]], version: int, objectives: int
) -> None:
    members = tuple(
        Written(tuple(ids), tuple(-0.5 - n for n in range(len(ids))), "é", "stop", (0.1,) * objectives)
        for ids in answers
    )
    group = Group(4, tuple(prompt), members, version, "a.jsonl:3")
    again = group_from_json(json.loads(json.dumps(group_to_json(group))))
    assert again == group and again.place == group.place and again.even
    batch = laid_in_rows([group], width=group.longest + 2, version=version + 3)
    assert batch.rewards.shape == ((len(answers),) if objectives == 1 else (len(answers), objectives))
    assert batch.ages is not None and batch.ages.tolist() == [3] * len(answers)
    for row, ids in enumerate(answers):
        places = np.flatnonzero(batch.batch.targets[row] != IGNORED)
        assert batch.batch.targets[row, places].tolist() == ids
        assert batch.behaviour[row, places].tolist() == [-0.5 - n for n in range(len(ids))]
        assert batch.batch.ids[row, : len(prompt)].tolist() == prompt and places[0] == len(prompt) - 1


# Ends ----------------------------------------------------------------------------------------------------------------------


def test_the_end_token_is_learnt_and_not_judged(tmp_path: Path, tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_id
    assert end is not None
    model = model_of(tokenizer)
    with torch.no_grad():  # it ends about every third answer at each token
        model.embedding.weight[end] = model.embedding.weight.mean(0) + 0.3
    asked = [{"prompt": "n:", "completion": [""]}]
    source = following(rollouts(tmp_path, rows=asked, max_tokens=5, group=16), tokenizer, model)
    batch = next(source)
    answers = [answer for group in source.last for answer in group.answers]
    ended = [answer for answer in answers if answer.finish == "stop"]
    assert 3 < len(ended) < len(answers) and source.counts()["answers cut off"] == len(answers) - len(ended)
    assert all(answer.ids[-1] == end and "<|" not in answer.text for answer in ended)
    assert all(end not in answer.ids and len(answer.ids) == 5 for answer in answers if answer.finish == "length")
    for row, answer in enumerate(answers):
        targets = batch.batch.targets[row]
        assert targets[targets != IGNORED].tolist() == list(answer.ids)
        assert (answer.rewards == (1.0,)) == (answer.text.strip() == "")


def test_texts_that_end_an_answer_are_learnt_and_not_judged(tmp_path: Path, tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("yes. No")
    asked = [{"prompt": "n:", "completion": "yes"}]
    cfg = rollouts(tmp_path, runner="alone", rows=asked, max_tokens=9, prompts=1, group=1, stop=["."])
    source = following(cfg, tokenizer, Scripted(script, tokenizer.vocab_size))
    batch = next(source)
    assert source.last[0].answers[0].text == "yes" and batch.rewards.tolist() == [1.0]
    targets = batch.batch.targets[0]
    assert targets[targets != IGNORED].tolist() == tokenizer.encode("yes.")


# What goes wrong -----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_is_named_or_skipped_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [*ASKED, {"prompt": "x" * 40, "completion": "y"}, {"prompt": "x" * 30, "completion": "y"}]
    cfg = rollouts(tmp_path, rows=rows, prompts=3, max_tokens=8)
    with pytest.raises(BadSample, match=r"asked.jsonl:3: .* leave no room") as said:
        next(following(cfg, tokenizer, model_of(tokenizer, context=32)))
    assert said.value.reason == "no-room" and said.value.hint
    source = following(cfg.clone(on_bad="skip"), tokenizer, model_of(tokenizer, context=32))
    next(source)
    assert source.counts()["bad"] == 1 and "no-room" in source.summary()
    longest = max(len(answer.ids) for answer in source.last[2].answers)
    assert longest == 2, "the context ends before max_tokens"


def test_prompts_come_to_an_end_or_never_began(tmp_path: Path, tokenizer: Tokenizer) -> None:
    cfg = rollouts(tmp_path, prompts=2, group=2)
    source = following(cfg.clone(source=cfg.source.source), tokenizer, model_of(tokenizer))  # type: ignore[attr-defined]
    next(source)
    with pytest.raises(StopIteration):
        next(source)
    source.begin(1)
    next(source)
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = cfg.source.source.clone(paths=str(tmp_path / "empty.jsonl"))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="nothing to learn"):
        next(following(cfg.clone(source=empty), tokenizer, model_of(tokenizer)))


def test_rows_without_a_question_or_an_answer_to_compare_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "n:"}\n')
    with pytest.raises(BadSample, match=r"asked.jsonl:1: the field 'completion'"):
        next(following(rollouts(tmp_path), tokenizer, model_of(tokenizer)))
    cfg = rollouts(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "plain"}\n')
    cfg.source.source = cfg.source.source.clone(paths=str(tmp_path / "text.jsonl"), form="samples")  # type: ignore[attr-defined]
    with pytest.raises(BadSample, match="no question") as said:
        next(following(cfg, tokenizer, model_of(tokenizer)))
    assert "form" in said.value.hint


def test_weights_that_broke_are_said_to_be_broken(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    for runner in ("together", "alone"):
        with pytest.raises(RolloutFailed, match=r"asked.jsonl:1.*NaN"):
            next(following(rollouts(tmp_path, runner=runner), tokenizer, model))


def test_settings_that_make_no_sense_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for wrong in ({"temperature": 0.0}, {"prompts": 3, "minibatches": 2}, {"group": 0}, {"lag": -1}, {"runner": "x"}):
        with pytest.raises(ConfigError):
            rollouts(tmp_path, **wrong).build(tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"temperature 0\.5 and learnt at 1\.0"):
        made(tmp_path, tokenizer, source={"temperature": 0.5}, objective=PolicyGradient.Config())
    with pytest.raises(ConfigError, match="12 rows cut groups of 8"):
        made(tmp_path, tokenizer, micro=12)
    source: Rollouts = rollouts(tmp_path).build(tokenizer=tokenizer)
    with pytest.raises(UsageError, match="which model"):
        next(source)
    stage = model_of(tokenizer)
    stage.__dict__["_layers_kept"] = range(1)
    with pytest.raises(UnsupportedPair, match="pipeline"):
        source.follow(stage, "cpu")
    with pytest.raises(ConfigError, match="3 processes"):
        source.shard(0, 3)
    with pytest.raises(UsageError, match="process 2 of 2"):
        source.shard(2, 2)


# Another writer -------------------------------------------------------------------------------------------------------------


class Elsewhere(Writer):
    """A writer that is behind: it works on the oldest round when somebody waits for it, as other machines would."""

    def __init__(self) -> None:
        self.version, self.asked = 0, []  # type: ignore[var-annotated]
        self.calls: list[str] = []

    def follow(self, model: Any, device: torch.device) -> None:
        self.calls.append("follow")

    def moved(self, version: int) -> None:
        self.version = version

    def ask(self, questions: Any) -> None:
        self.calls.append(f"ask {len(self.asked)}")
        self.asked.append((self.version, list(questions)))

    def take(self) -> list[Group]:
        version, questions = self.asked.pop(0)
        answer = Written((65,), (-1.0,), "a", "length", (1.0,))
        return [self._group(question, answer, version) for question in questions]

    def _group(self, question: Question, answer: Written, version: int) -> Group:
        return Group(question.number, question.ids, (answer,) * len(question.seeds), version)

    def close(self) -> None:
        self.calls.append("close")


def test_a_writer_elsewhere_needs_no_other_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source: Rollouts = rollouts(tmp_path, lag=2, prompts=2, group=2).build(tokenizer=tokenizer)
    writer = source.writer = Elsewhere()
    source.follow(model_of(tokenizer), "cpu")
    ages = []
    for step in range(5):
        ages.append(next(source).ages.tolist()[0])  # type: ignore[union-attr]
        source.moved(step + 1)
    assert ages == [0, 1, 2, 2, 2] and writer.calls[1:5] == ["ask 0", "ask 1", "ask 2", "ask 2"]
    assert len(source.state()["held"]) == 2 and not writer.asked, "what is under way is waited for"
    assert next(source).ages.tolist()[0] == 2  # type: ignore[union-attr]
    source.close()
    assert writer.calls[-1] == "close"


def test_a_row_is_one_of_the_forms(tokenizer: Tokenizer) -> None:
    from orchard.data.prompts import prompt_ids
    from orchard.text.chat import chat_ids

    assert prompt_ids(tokenizer, Row({"prompt": "hi"}), chat=False) == tokenizer.encode("hi")
    assert prompt_ids(tokenizer, Row({"prompt": "hi"})) == chat_ids(tokenizer, "hi")
    talk = [{"role": "user", "content": "hi"}]
    assert prompt_ids(tokenizer, Row({"messages": talk})) == chat_ids(tokenizer, talk)


def test_saving_often_changes_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = {"lag": 1, "minibatches": 2, "group": 4}
    runs = [
        made(tmp_path, tokenizer, f"r{every}", steps=6, source=source, save=Saving.Config(every=every)).run()
        for every in (1, 100)
    ]
    assert runs[0].series["loss"] == runs[1].series["loss"]


def test_what_the_page_says_can_be_written(tokenizer: Tokenizer) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 (our own page)
    source, objective = names["source"], names["objective"]
    assert source.temperature == objective.temperature and source.complete() and objective.build()
    for runner in RUNNERS:
        assert f"| `{runner}`" in page
