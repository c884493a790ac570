"""Finds studies, runs one, judges its claims.

A study is a file of this folder with three things:

- a docstring: its first line names it, the rest says what was published, where, and what differs here;
- `CLAIMS`, a list of `Claim`: what must hold, decided before anything runs;
- `run(scale)` or `run(scale, seed)`, which measures and returns an `Outcome` or just a dictionary of values.

It may show its progress with `orchard.core.progress`. The file's name is the slug, with `_` for each `-`. Files whose
names start with `_` are helpers. An error inside a study is not caught: a study that cannot run has no Report.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from orchard.core.errors import ConfigError, UsageError
from orchard.core.machine import CHECKOUT
from orchard.core.report import Claim, Report, Scalar, Value

FOLDER = Path(__file__).parent
SCALES = ("small", "full")
_NOT_STUDIES = ("harness",)


@dataclass(kw_only=True)
class Outcome:
    """What a run measured. `reasons` says, by claim id, why a claim came out as it did."""

    values: Mapping[str, Value | Scalar]
    series: Mapping[str, list[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reasons: Mapping[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None


def available() -> dict[str, str]:
    """Every study's slug and the first line of its docstring. Nothing is imported."""
    names = sorted(module.name for module in iter_modules([str(FOLDER)]))
    return {_slug(name): _first_line(name) for name in names if not name.startswith("_") and name not in _NOT_STUDIES}


def study(slug: str, scale: str = "small", *, seed: int = 0, save: bool | str | Path = False) -> Report:
    """Run a study and judge its claims. `save`: True for `results/studies/<slug>.json`, or a path of your own."""
    module = _module(slug)
    if scale not in SCALES:
        raise UsageError(f"there is no scale {scale!r}", hint="one of " + ", ".join(SCALES))
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"{seed!r} is no seed", hint="use a whole number from 0 on")
    target = _target(slug, save)  # before the run: a place that cannot be used should not cost minutes
    claims = getattr(module, "CLAIMS", None)
    if not isinstance(claims, list) or not all(isinstance(claim, Claim) for claim in claims):
        raise ConfigError(f"study {slug!r} has no list CLAIMS of Claim", hint="see orchard/studies/harness.py")
    start = time.perf_counter()
    given = module.run(scale, seed) if len(inspect.signature(module.run).parameters) > 1 else module.run(scale)
    took = time.perf_counter() - start
    outcome = given if isinstance(given, Outcome) else Outcome(values=given)
    report = Report.record(
        "study",
        slug,
        values=outcome.values,
        claims=claims,
        seed=seed,
        reasons=outcome.reasons,
        series=dict(outcome.series),
        notes=list(outcome.notes),
        config={"scale": scale, **(outcome.config or {})},
        wall_time=round(took, 3),
    )
    if target is not None:
        report.save(target)
    return report


def results_folder() -> Path:
    """Where a checkout keeps the Reports of its studies."""
    if not (CHECKOUT / "pyproject.toml").is_file():
        raise UsageError("Orchard does not run from a checkout", hint="say where to save: save='report.json'")
    return CHECKOUT / "results" / "studies"


def card(slug: str) -> str:
    """A study's page: its docstring and the last Report in the results folder, if there is one."""
    about = _module(slug).__doc__ or slug
    stored = results_folder() / f"{slug}.json"
    if stored.exists():
        return Report.load(stored).card(about)
    return f"{inspect.cleandoc(about)}\n\nNo Report yet: run `orchard study {slug}`.\n"


def _module(slug: str) -> ModuleType:
    known = available()
    if slug not in known:
        near = difflib.get_close_matches(str(slug), known, n=3)
        hint = "did you mean " + " or ".join(near) if near else "studies: " + ", ".join(known)
        raise UsageError(f"there is no study {slug!r}", hint=hint)
    return import_module(f"orchard.studies.{_file(slug)}")


def _target(slug: str, save: bool | str | Path) -> Path | None:
    if save is False:
        return None
    if save is True:
        return results_folder() / f"{slug}.json"
    path = Path(save)
    return path if path.suffix == ".json" else path / f"{slug}.json"


def _slug(name: str) -> str:
    return name.replace("_", "-")


def _file(slug: str) -> str:
    return slug.replace("-", "_")


def _first_line(name: str) -> str:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
