"""The folder of a compression that is under way: what was asked for, which steps are done, and the model after the last of them.

mine.work/plan.json              what was asked for: the same command goes on, another one is refused
mine.work/text/                  what is learnt from and measured on
mine.work/2-heal/model.orchard   the model after step 2; step.json beside it says that it is whole, and what was measured
mine.work/2-heal/run/            checkpoints of a step that learns
mine.work/result.json            what came of it, when everything is done
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from orchard.core.errors import BadFile, UsageError
from orchard.core.files import write_text
from orchard.models.language.decoder import Decoder
from orchard.session.build import Built
from orchard.session.save import save_built
from orchard.text.tokenizer import Tokenizer
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder

ENDING = ".work"
PLAN, STEP, MODEL, RESULT, TEXT, RUN = "plan.json", "step.json", "model.orchard", "result.json", "text", "run"
LOCK = ".lock"
OWN = frozenset({"plan", "budget", "stop", "tokens"})
"""What compressions that share their first steps may differ in."""
VERSION = 1


class OtherWork(UsageError):
    """The folder holds a compression of another kind."""

    code = "other-work"


class Work:
    """`begin` first."""

    def __init__(self, target: Path, words: list[str]) -> None:
        self.folder = target.with_name(target.stem + ENDING)
        self._names = [f"{number}-{word.partition(':')[0]}" for number, word in enumerate(words, 1)]

    def is_mine(self, asked: Mapping[str, Any]) -> bool:
        """Whether this very compression began here. Another one, unless it is finished, is refused by the first difference."""
        kept = _read(self.folder / PLAN)
        if kept is None:
            if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / TEXT).exists():
                raise OtherWork(
                    f"{self.folder} is there, and holds no compression", hint="name another file with --to, or move it"
                )
            return False
        plain = json.loads(json.dumps({"version": VERSION, **asked}))
        for name in [*plain, *(kept.keys() - plain.keys())]:
            if kept.get(name) != plain.get(name):
                if self.result() is not None:  # it is done, and only its Report is here
                    return False
                raise OtherWork(
                    f"{self.folder} holds a compression with another {name.replace('_', ' ')}: "
                    f"{_short(kept.get(name))}, not {_short(plain.get(name))}",
                    hint="repeat the command that was interrupted, or delete that folder",
                )
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock dies with its process."""
        from filelock import FileLock, Timeout

        self.text.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(self.folder / LOCK))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise OtherWork(
                f"another process is at work in {self.folder}", hint="wait for it, or name another file with --to"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Note what was asked for; what is left of one that was finished here goes."""
        for path in [self.folder / RESULT, *self.folder.glob("report.*"), *self.folder.glob("curves.*")]:
            path.unlink(missing_ok=True)
        self.text.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / PLAN, json.dumps({"version": VERSION, **asked}, indent=2) + "\n")

    def take_over(self, other: Path, asked: Mapping[str, Any]) -> int:
        """Begin with the text and the first steps of a compression that is under way in another folder, as far as both plans are
        the same; how many steps that is. Refused where they differ in more than plan, budget, stop rule and tokens."""
        theirs = _read(other / PLAN)
        plain = json.loads(json.dumps({"version": VERSION, **asked}))
        if theirs is None or (self.folder / PLAN).exists():
            problem = f"{other} holds no compression" if theirs is None else f"{self.folder} has begun already"
            raise OtherWork(problem, hint="take over one that is under way, before this one begins")
        for name in sorted((plain.keys() | theirs.keys()) - OWN):
            if theirs.get(name) != plain.get(name):
                raise OtherWork(
                    f"{other} has another {name.replace('_', ' ')}: {_short(theirs.get(name))}", hint="ask for the same"
                )
        steps = 0
        for number, (mine, their) in enumerate(zip(plain["plan"], theirs["plan"], strict=False), 1):
            place = other / self._names[number - 1]
            if mine != their or _read(place / STEP) is None:
                break
            steps = number if (place / MODEL).is_file() else steps
        self.begin(asked)
        for name in (TEXT, *self._names[:steps]):
            if (other / name).is_dir():
                shutil.copytree(other / name, self.folder / name, dirs_exist_ok=True)
        return steps

    @property
    def text(self) -> Path:
        return self.folder / TEXT

    def place(self, number: int) -> Path:
        """The folder of a step, counted from 1."""
        return self.folder / self._names[number - 1]

    def done(self, number: int) -> dict[str, Any] | None:
        """What a finished step left to say."""
        return _read(self.place(number) / STEP)

    def keep(
        self, number: int, built: Built, tokenizer: Tokenizer, source: Path, facts: Mapping[str, Any], good: int
    ) -> None:
        """Keep the model after a step, and of earlier ones only the last good one."""
        place = self.place(number)
        place.mkdir(parents=True, exist_ok=True)
        save_built(built, tokenizer, source, place / MODEL, None)
        write_text(place / STEP, json.dumps(facts, indent=2, allow_nan=False) + "\n")
        shutil.rmtree(place / RUN, ignore_errors=True)
        for earlier in range(1, number):
            if earlier != good:
                with suppress(OSError):
                    (self.place(earlier) / MODEL).unlink(missing_ok=True)

    def model(self, number: int, device: torch.device) -> Decoder:
        """The model after a step, in float32."""
        return read_model(self.place(number) / MODEL, device)

    def result(self) -> dict[str, Any] | None:
        return _read(self.folder / RESULT)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Say that all is done, and take away what was needed on the way."""
        write_text(self.folder / RESULT, json.dumps(facts, indent=2, allow_nan=False) + "\n")
        for name in (TEXT, *self._names):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def read_model(path: Path, device: torch.device | str = "cpu") -> Decoder:
    with open_checkpoint(path) as checkpoint:
        decoder: Decoder = load_decoder(checkpoint, checkpoint.config(), dtype=torch.float32, device=device)
    return decoder.eval()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} cannot be understood: {error}", hint="delete its folder and begin anew") from error
    return found if isinstance(found, dict) else None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "…"
