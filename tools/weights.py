"""Cut a model's file into parts for the repository's `weights/` folder, or check what lies there.

    python tools/weights.py split small.orchard --name smollm2-mix --draft draft.orchard --licence apache-2.0
    python tools/weights.py check

A part has at most 16 MB and all of them together at most 120 MB: a repository is cloned whole, by everybody. `check` reads every
byte, compares every sum and says what each model is made of. `orchard chat --model NAME` joins the parts when it is first named.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from orchard.core.errors import OrchardError
from orchard.weights.parts import LIST, PART_BYTES, Divided, read_parcel, split

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "weights"
MOST = 120_000_000
"""Bytes of everything below `weights/`."""


def faults(folder: Path) -> Iterator[str]:
    """What is wrong with a folder of parts: sums, sizes, files that no list names."""
    total = 0
    for model in sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else ():
        if not model.is_dir():
            yield f"{model} is no folder of a model"
            continue
        found = {path.name: path for path in model.rglob("*") if path.is_file()}
        total += sum(path.stat().st_size for path in found.values())
        try:
            parcel = read_parcel(model)
        except OrchardError as error:
            yield f"{error.message} ({error.hint})"
            continue
        named = {part.name: part for file in parcel.files for part in file.parts if not file.lent}
        for file in (file for file in parcel.files if file.lent):
            other = next((one for one in _parcel(folder / file.lent) if one.role == file.role), None)
            if other is None or (other.lent, other.whole, other.parts) != ("", file.whole, file.parts):
                yield f"{model / LIST}: {file.lent} does not hold its {file.role}"
        yield from (f"{model / name} is missing" for name in sorted(named.keys() - found.keys()))
        others = {name for name in found.keys() - named.keys() - {LIST} if not name.endswith(".md")}
        yield from (f"{model / name} is named by no list" for name in sorted(others))
        for name in sorted(named.keys() & found.keys()):
            data = found[name].read_bytes()
            if len(data) > PART_BYTES:
                yield f"{model / name} has {len(data):,} bytes, more than {PART_BYTES:,}"
            if hashlib.sha256(data).hexdigest() != named[name].sha256:
                yield f"{model / name} does not have the SHA-256 it should"
        if not parcel.licence or not parcel.source:
            yield f"{model / LIST} says no licence, or no source"
    if total > MOST:
        yield f"{folder} holds {total:,} bytes, more than {MOST:,}"


def _parcel(folder: Path) -> tuple[Divided, ...]:
    try:
        return read_parcel(folder).files
    except OrchardError:
        return ()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    cut = verbs.add_parser("split", help="cut a file into parts")
    cut.add_argument("file", type=Path)
    cut.add_argument("--name", required=True, help="what the model is called")
    cut.add_argument("--draft", type=Path, help="a smaller model that guesses for it")
    cut.add_argument("--draft-of", help="a model in the folder that has the same draft")
    cut.add_argument("--licence", required=True)
    cut.add_argument("--source", required=True, help="where it came from: model, recipe, commit")
    look = verbs.add_parser("check", help="compare everything with its sums")
    for verb in (cut, look):
        verb.add_argument("--folder", type=Path, default=FOLDER, help="instead of the checkout's weights/")
    given = parser.parse_args(arguments)
    if given.verb == "split":
        try:
            about = {"draft": given.draft, "draft_of": given.draft_of, "licence": given.licence, "source": given.source}
            parcel = split(given.file, given.folder, given.name, **about)
        except OrchardError as error:
            print(f"error: {error.message} ({error.hint})", file=sys.stderr)
            return error.exit_code
        count = sum(len(file.parts) for file in parcel.files)
        print(f"{parcel.folder}: {parcel.bytes:,} bytes in {count} parts")
    found = list(faults(given.folder))
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    if not found:
        print(f"Weights: {given.folder} is whole.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
