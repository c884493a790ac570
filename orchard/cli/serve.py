"""`orchard serve [MODEL …]`: models of this machine over HTTP, for as long as it runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli.common import note, print_json
from orchard.cli.options import OfflineOption
from orchard.core.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from orchard.serve.server import Listening
    from orchard.serve.settings import Settings

LEVELS = ("debug", "info", "warning", "error")


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models to serve, each NAME, PATH or NAME=PATH; the first is the default one. None: smollm2, and every model "
            "of the library when it is asked for.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Anything but this machine needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes any port that is free.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Let in only those with a key of this file; it is made, with a key, if it is not there.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="[BASE:]NAME=PATH", help="Serve an adapter as BASE:NAME; may be repeated."),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL=]NAME", help="A smaller model that guesses tokens for one that is served; may be repeated."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="The most that loaded models may take, such as 8GB. Default: half of what is free."
        ),
    ] = None,
    experts_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Leave the experts of mixtures on disk and keep no more of them in memory than this, such as 200MB.",
        ),
    ] = None,
    conversation_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Keep each conversation within this, however long it gets, such as 64MB; old parts are forgotten.",
        ),
    ] = None,
    conversations: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many are remembered, with --conversation-memory.")
    ] = 4,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="The longest answer, in tokens.")] = None,
    running: Annotated[int | None, typer.Option(metavar="N", min=1, help="Answers at a time.  [default: 32]")] = None,
    queue: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Answers that may wait; more get 429.  [default: 128]")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="The longest a request may take.  [default: 600]")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further name that clients may call this server by; may be repeated."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="A web page that may use it, such as http://localhost:3000; may be repeated."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Speak TLS, with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PATH", help="The key of the certificate (PEM).")] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Leave out the chat page at /.")] = False,
    cluster: Annotated[bool, typer.Option("--cluster", help="Run replicas on a Ray cluster behind one door.")] = False,
    replicas: Annotated[int, typer.Option(metavar="N", min=1, help="How many, with --cluster.")] = 1,
    cluster_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster that runs already. Default: one of our own.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help=f"{', '.join(LEVELS)}; info has a line for each request.")
    ] = "warning",
    offline: OfflineOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when it is ready.")] = False,
) -> None:
    """Serve models over HTTP as OpenAI and Anthropic do, with a chat page at /.

    Ctrl-C lets running answers finish and stops; a second Ctrl-C stops at once.
    """
    from orchard.cli import common

    common.go_offline(offline)
    _need_the_extra()
    if log_level not in LEVELS:
        raise UsageError(f"--log-level: {log_level!r} is none of them", hint=f"use one of {', '.join(LEVELS)}")
    if (replicas > 1 or cluster_address is not None) and not cluster:
        raise UsageError("replicas run on a cluster", hint="add --cluster")
    from orchard.cli.serving import keys_for, limits_of, settings_for

    settings = settings_for(
        models or [],
        adapter or [],
        draft or [],
        memory=memory,
        experts_budget=experts_budget,
        conversation=conversation_memory,
        conversations=conversations,
        hosts=allow_host or [],
        origins=origin or [],
        limits=limits_of(max_tokens=max_tokens, running=running, queue=queue, deadline=deadline),
    )
    settings = replace(
        settings,
        host=host,
        port=port,
        tls_cert=None if tls_cert is None else str(tls_cert),
        tls_key=None if tls_key is None else str(tls_key),
        page=not no_page,
    )
    settings = replace(settings, keys=keys_for(host, api_key_file))
    with _log_at(log_level):
        code = _run(settings, cluster, replicas, cluster_address, as_json)
    _end(code)


def _run(settings: Settings, cluster: bool, replicas: int, address: str | None, as_json: bool) -> int:
    from orchard.serve.origin import Rules

    Rules(settings)  # names and origins that are none are told before anything is opened

    def ready(listening: Listening) -> None:
        _tell(listening, settings, as_json)

    if cluster:
        from orchard.serve.cluster.run import run_cluster

        return run_cluster(settings, replicas, address, ready=ready)
    from orchard.serve.server import serve as run

    return run(settings, ready=ready)


def _tell(listening: Listening, settings: Settings, as_json: bool) -> None:
    names = [name for spec in settings.models for name in (spec.name, *(f"{spec.name}:{a}" for a in spec.adapters))]
    more = ", and the rest of the library" if settings.any_model else ""
    note(f"listening at {listening.url}/v1 for {', '.join(names)}{more}")
    if listening.host in ("0.0.0.0", "::"):
        note(f"and at every other address of this machine, port {listening.port}")
    if settings.page:
        note(f"chat page: {listening.url}/")
    note("Ctrl-C stops it")
    if as_json:
        print_json({"url": listening.url, "models": names, "pid": os.getpid()}, indent=None)
        sys.stdout.flush()


def _end(code: int) -> None:
    if code >= 128:  # asked twice: threads that are in the midst of something are not waited for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        raise typer.Exit(code)


def _need_the_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"the server needs {' and '.join(missing)}", hint="install them with: pip install 'orchard[serve]'"
        )


@contextmanager
def _log_at(level: str) -> Iterator[None]:
    """Our log, and uvicorn's complaints, on stderr while the server runs."""
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    least = getattr(logging, level.upper())
    before = []
    for name, floor in (("orchard", least), ("uvicorn", max(logging.WARNING, least))):
        logger = logging.getLogger(name)
        before.append((logger, logger.handlers, logger.propagate, logger.level))
        logger.handlers, logger.propagate = [shown], False
        logger.setLevel(floor)
    try:
        yield
    finally:
        for logger, handlers, propagate, old in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old)
