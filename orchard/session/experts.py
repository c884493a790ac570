"""A mixture whose experts stay on disk: two files beside the packed ones, made once by a process of its own.

`<packed name>.base.orchard` is the plan without its experts, read into memory; `<packed name>.experts` has one record per expert
(orchard/cache/experts). Making them takes as much memory as the whole model, so another process does it, and this one never
grows beyond the rest of the model and the budget.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchard.core.digest import sha256
from orchard.core.errors import BadFile, OrchardError, UnsupportedPair, UsageError
from orchard.session.build import Later, build
from orchard.session.place import may_have_cuda
from orchard.session.prepare import (
    BASE,
    ENDING,
    EXPERTS,
    Prepared,
    _alone,
    _CannotKeep,
    _facts,
    made,
    open_packed,
    packed_path,
)
from orchard.weights.library import Library
from orchard.weights.packed import write_packed

if TYPE_CHECKING:
    from orchard.generate.experts_open import ExpertsOptions
    from orchard.session.model import Model


def load_elsewhere(
    name: str | Path, experts: int | str | ExpertsOptions, *, dtype: str, device: str, rewritten: bool
) -> Model:
    """See `orchard.load`."""
    from orchard.generate.experts_open import open_experts, options_of
    from orchard.ops.kernels.native import why_not
    from orchard.session.assets import refuse_if_forbidden
    from orchard.session.model import Model

    options = options_of(experts)
    if options.budget_bytes <= 0:
        raise UsageError(f"a budget of {options.budget} for experts", hint="give some bytes, as in 200MB")
    if dtype != "auto" or rewritten or device not in ("auto", "cpu") or (device == "auto" and may_have_cuda()):
        raise UnsupportedPair(
            "experts live elsewhere on the native engine only: on a CPU, with the file's own formats",
            hint='leave out dtype and rewrite, and say device="cpu"',
        )
    if missing := why_not():
        raise UnsupportedPair(
            f"experts live elsewhere on the native engine only, and there is none: {missing}",
            hint="`orchard doctor` says how to mend it",
        )
    refuse_if_forbidden(name)
    source = Library().resolve(str(name))
    found = ready_experts(source)
    assert found.plan is not None and found.tokenizer is not None
    runner = open_experts(found.plan, _beside(source, EXPERTS), options, {"state": state_of(source)})
    later = Later(lambda: build(source, None)[1])
    return Model(later, found.tokenizer, name=str(name), source=source, plan=found.plan, runner=runner)


def ready_experts(source: Path) -> Prepared:
    """The plan without experts; both files are made where one is missing or of no use."""
    found = _opened(source)
    if found is None:
        try:
            with _alone(packed_path(source)):
                found = _opened(source)
                if found is None:
                    _make_apart(source)
                    found = _opened(source)
        except _CannotKeep as refusal:
            raise UsageError(
                f"the experts of {source.name} cannot be put into a file of their own: {refusal}",
                hint="make room in ORCHARD_HOME, or load it without experts_budget",
            ) from refusal
    if found is None:
        raise BadFile(f"the experts of {source.name} were written and cannot be read", hint="look after the disk")
    return found


def make(source: Path) -> None:
    """Write both files, in this process."""
    from orchard.generate.experts_file import without_experts, write_experts
    from orchard.ops.plan.file import to_json
    from orchard.text.packed import pack

    whole = made(source)
    if whole.plan is None or whole.tokenizer is None:
        raise UnsupportedPair(
            f"{source.name} has no native plan: {whole.reason}", hint="load it without experts_budget"
        )
    facts, words = pack(whole.tokenizer)
    base = without_experts(whole.plan)
    header = {"source": _facts(source), "plan": to_json(base), "tokenizer": facts, "elsewhere": base.elsewhere}
    if not base.elsewhere:
        raise UsageError(f"{source.name} has no experts", hint="load it without experts_budget")
    write_packed(_beside(source, BASE), header, {**base.tensors, **words})
    write_experts(_beside(source, EXPERTS), whole.plan, {"model": source.name, "state": state_of(source)})


def state_of(source: Path) -> str:
    """Tells this state of a model's files from any other."""
    return sha256(packed_path(source).name.encode()).hex()[:16]


def _beside(source: Path, ending: str) -> Path:
    path = packed_path(source)
    return path.with_name(path.name.removesuffix(ENDING) + ending)


def _opened(source: Path) -> Prepared | None:
    base, experts = _beside(source, BASE), _beside(source, EXPERTS)
    if not base.is_file() or not experts.is_file():
        return None
    from orchard.generate.experts_open import check_file

    try:
        check_file(experts, {"state": state_of(source)})
        return open_packed(base)
    except BadFile:
        return None


def _make_apart(source: Path) -> None:
    """In another process, whose memory goes with it; in this one where that fails, so that errors are the model's own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "orchard.session.experts", str(source)],
            capture_output=True,
            timeout=3600,
            check=False,
        )
        if done.returncode == 0:
            return
    except (OSError, subprocess.SubprocessError):
        pass
    make(source)


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]))
    except OrchardError:
        sys.exit(1)
