"""`orchard schema`: the JSON Schema of a class, of examples, or of what a person says when asked.

What is printed can be given to `orchard respond --schema`; one that no answer could be held to is refused here, by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from orchard.cli.common import note, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError


def schema(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:CLASS|FILE",
            help="A class of yours (its module is imported, from this folder too), or a JSON Schema to check. "
            "Nothing, in a terminal: you are asked for the fields.",
            show_default=False,
        ),
    ] = None,
    examples: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="Infer it from examples: JSON, or JSON Lines.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What an inferred schema is called.")] = "Answer",
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there; - is standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the JSON Schema of a class, or make one from examples or by asking."""
    if what is not None and examples is not None:
        raise UsageError("a class and --from are two schemas", hint="give one of them")
    target = None if output in (None, "-") else Path(str(output))
    if target is not None and target.exists() and not force:
        raise UsageError(f"{target} is there already", hint="choose another name, or add --force")
    made = _made(what, examples, name)
    if target is None:
        print_json(made)
        return
    from orchard.core.files import write_text

    try:
        write_text(target, json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint="choose another file") from error
    note(f'wrote {target}; use it: orchard respond "…" --schema {target}')


def _made(what: str | None, examples: str | None, name: str) -> dict[str, Any]:
    from orchard.cli.guided import checked_schema, form_of

    if examples is not None:
        from orchard.cli.infer import infer

        return checked_schema(infer(read_examples(Path(examples)), name))
    if what is not None:
        return checked_schema(next(iter(form_of(what).values())))
    if not sys.stdin.isatty():
        raise UsageError("no class and no examples", hint="name one: orchard schema module:Class, or --from FILE.json")
    from orchard.cli.schema_ask import ask_schema

    return checked_schema(ask_schema(_ask))


def read_examples(path: Path) -> list[Any]:
    """Examples of a file: one JSON value (a list is a list of examples), or one on every line."""
    from orchard.cli.guided import MOST_BYTES, read_json

    if path.suffix != ".jsonl":
        value = read_json(path, "--from")
        examples = value if isinstance(value, list) else [value]
    else:
        try:
            if path.stat().st_size > MOST_BYTES:
                raise UsageError(f"--from: {path} is larger than {MOST_BYTES // 2**20} MiB", hint="some lines will do")
            lines = path.read_text(encoding="utf-8").splitlines()
            examples = [json.loads(line) for line in lines if line.strip()]
        except OSError as error:
            raise UsageError(f"--from: {path} cannot be read: {error.strerror}", hint="check the path") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--from: {path} is not JSON Lines", hint="one JSON value on every line") from error
    if not examples:
        raise UsageError(f"--from: {path} holds no example", hint="give at least one")
    return examples


def _ask(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return input()
