"""`orchard`: the verbs, and the one place where errors become exit codes.

0 is success, 1 a failure, 2 wrong usage, 130 an interruption. Results go to stdout, everything else to stderr. An error is
one line and a hint; `ORCHARD_DEBUG=1` shows the traceback. Verb modules import their work inside their functions, so that
`orchard --help` needs neither torch nor any other heavy package; and a plain `orchard respond` not even the parser.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from orchard.cli import process, quick
from orchard.cli.common import print_json
from orchard.core.errors import OrchardError


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; nothing is raised."""
    as_json = "--json" in arguments[: arguments.index("--")] if "--" in arguments else "--json" in arguments
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _reader_left()
    except KeyboardInterrupt:
        return 130
    except OrchardError as error:
        return _report(error.to_dict(), error.exit_code, as_json)
    except OSError as error:
        return _report(_system_facts(error), 1, as_json)
    except Exception as error:
        if type(error).__name__ == "Abort" and type(error).__module__.startswith("typer"):
            return 130
        if callable(getattr(error, "format_message", None)):  # a usage error of typer, or of the click inside it
            return _usage(error, arguments, as_json)
        message = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"
        hint = "this is a fault of Orchard; run it again with ORCHARD_DEBUG=1 to see the traceback"
        return _report({"code": "unexpected", "message": message, "hint": hint, "retryable": False}, 1, as_json)


def _run(arguments: Sequence[str]) -> object:
    understood = quick.parse(arguments)
    if understood is not None:
        from orchard.cli.answer import respond_to

        respond_to(**understood)
        return None
    from orchard.cli.verbs import app

    return app(args=list(arguments), prog_name="orchard", standalone_mode=False)


def __getattr__(name: str) -> Any:
    """`app`, for programs that describe the command line; it costs typer."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchard.cli.verbs import app

    return app


def run() -> None:
    """The entry point of the `orchard` program."""
    process.prepare()
    code = main(sys.argv[1:])
    process.finish()
    sys.exit(code)


def _usage(error: Any, arguments: Sequence[str], as_json: bool) -> int:
    from orchard.cli.verbs import app

    known: list[Any] = [*app.registered_commands, *app.registered_groups]
    verbs = {command.name for command in known}
    path = " ".join(["orchard", *[word for word in arguments[:1] if word in verbs]])
    facts = {"code": "usage", "message": error.format_message(), "hint": f"see `{path} --help`", "retryable": False}
    return _report(facts, int(getattr(error, "exit_code", 2)), as_json)


def _system_facts(error: OSError) -> dict[str, Any]:
    """The machine refused something that no verb foresaw: a full disk under stdout, a folder without permission."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    place = error.filename or ("the output cannot be written" if full else "the system refused something")
    message = f"{place}: {error.strerror or error}"
    hint = "check the place, its permissions and its free space; ORCHARD_DEBUG=1 shows where it happened"
    return {"code": "system", "message": message, "hint": hint, "retryable": False}


def _report(facts: dict[str, Any], code: int, as_json: bool) -> int:
    if os.environ.get("ORCHARD_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exc()
    with suppress(OSError):  # the part of a result that is there comes before what went wrong
        sys.stdout.flush()
    with suppress(OSError):  # there may be nobody to tell
        print(f"error: {facts['message']}", file=sys.stderr)
        if facts["hint"]:
            print(f"hint: {facts['hint']}", file=sys.stderr)
    try:
        if as_json:
            print_json({"error": facts})
        sys.stdout.flush()
    except OSError:
        _reader_left()
    return code


def _reader_left() -> int:
    """Nobody takes our output any more: leave without a word, also when Python flushes stdout at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
