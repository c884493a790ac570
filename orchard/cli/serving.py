"""What `orchard serve` was told, as the server's settings: names are looked up and mistakes told before a port is opened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.cli.common import note
from orchard.core.errors import ModelNotFound, UsageError
from orchard.core.sizes import bytes_of as bytes_of

if TYPE_CHECKING:
    from orchard.serve.settings import Limits, Settings

DEFAULT = "smollm2"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATH_LIKE = (".", "/", "~")


def settings_for(
    models: Sequence[str],
    adapters: Sequence[str],
    drafts: Sequence[str] = (),
    *,
    memory: str | None,
    experts_budget: str | None = None,
    conversation: str | None = None,
    conversations: int = 4,
    hosts: Sequence[str],
    origins: Sequence[str],
    limits: Limits,
) -> Settings:
    """`ModelNotFound` names the near ones; `UsageError` for anything else that makes no sense."""
    from orchard.serve.settings import ModelSpec, Settings

    sources = sources_of(models or [DEFAULT])
    given = adapters_of(adapters, sources, any_model=not models)
    guessing = drafts_of(drafts, sources)
    budget = None if experts_budget is None else bytes_of(experts_budget)
    remembered = None if conversation is None else bytes_of(conversation)
    return Settings(
        tuple(
            ModelSpec(name, source, given.get(name, {}), guessing.get(name), budget, remembered, conversations)
            for name, source in sources.items()
        ),
        hosts=tuple(hosts),
        origins=tuple(origins),
        memory=None if memory is None else bytes_of(memory),
        any_model=not models,
        limits=limits,
    )


def limits_of(**given: Any) -> Limits:
    """The usual limits, but for those that are given."""
    from orchard.serve.settings import Limits

    return Limits(**{name: value for name, value in given.items() if value is not None})


def sources_of(models: Sequence[str]) -> dict[str, str]:
    """Name → source, in the order given. A path without a name is called by its last part."""
    from orchard.weights.library import Library

    library = Library()
    found: dict[str, str] = {}
    for text in models:
        name, source = _named(text)
        path = library.resolve(source)
        is_path = source.startswith(_PATH_LIKE) or library_name_missing(library, source)
        if name is None:
            name = _called(path) if is_path else source
        if name in found:
            raise UsageError(f"two models are called {name!r}", hint="name one otherwise: OTHER=PATH")
        found[name] = str(Path(source).expanduser().absolute()) if is_path else source
    return found


def library_name_missing(library: Any, source: str) -> bool:
    try:
        return library.find(source) is None
    except UsageError:  # no name at all
        return True


def _named(text: str) -> tuple[str | None, str]:
    name, equals, source = text.partition("=")
    if not equals or Path(text).expanduser().exists():
        return None, text
    if not _NAME.fullmatch(name):
        hint = "NAME=PATH; a name is made of letters, digits, dots, dashes and underscores"
        raise UsageError(f"{name[:80]!r} cannot be the name of a model", hint=hint)
    if not source:
        raise UsageError(f"{text!r} names no model", hint="write NAME=PATH, or a name of the library")
    return name, source


def _called(path: Path) -> str:
    """`/models/my-model.gguf` and `/models/my-model/` are both my-model."""
    place = path.expanduser().absolute()
    return (place.stem if place.suffix in (".gguf", ".orchard") else place.name) or "model"


def adapters_of(given: Sequence[str], sources: dict[str, str], *, any_model: bool) -> dict[str, dict[str, str]]:
    """Base → name → folder. Further bases join `sources` where every model of the library may be asked for."""
    found: dict[str, dict[str, str]] = {}
    for text in given:
        name, equals, path = text.partition("=")
        base, colon, short = name.rpartition(":")
        if not equals or not path or not _NAME.fullmatch(short) or (colon and not base):
            raise UsageError(f"--adapter: {text[:80]!r} is not understood", hint="write NAME=PATH, or BASE:NAME=PATH")
        base = base or next(iter(sources))
        if base not in sources:
            if not any_model:
                raise UsageError(f"--adapter: {base!r} is not served", hint=f"served are {', '.join(sources)}")
            try:
                sources |= sources_of([base])
            except ModelNotFound as error:
                raise ModelNotFound(f"--adapter: {error.message}", hint=error.hint) from error
        folder = Path(path).expanduser().absolute()
        if not (folder / "adapter_config.json").is_file():
            hint = "name a folder with adapter_config.json, as PEFT and Orchard write them"
            raise UsageError(f"--adapter: {path} is no adapter", hint=hint)
        if short in found.setdefault(base, {}):
            raise UsageError(f"--adapter: two are called {base}:{short}", hint="name one of them otherwise")
        found[base][short] = str(folder)
    return found


def drafts_of(given: Sequence[str], sources: dict[str, str]) -> dict[str, str]:
    """Model → the one that guesses for it."""
    found: dict[str, str] = {}
    for text in given:
        before, equals, after = text.partition("=")
        name, draft = (before, after) if equals and before in sources else (next(iter(sources)), text)
        if name in found:
            raise UsageError(f"--draft: two are to guess for {name}", hint="give one for each: MODEL=NAME")
        if draft == "none":  # not even the one that the model came with
            found[name] = draft
            continue
        try:
            found[name] = next(iter(sources_of([draft]).values()))
        except ModelNotFound as error:
            raise ModelNotFound(f"--draft: {error.message}", hint=error.hint) from error
    return found


def keys_for(host: str, file: Path | None) -> tuple[str, ...]:
    """Hashes of the keys that are let in. Where one is needed and none is given it is made, and shown this once."""
    from orchard.serve.keys import hashed, new_key, read_keys, write_key
    from orchard.serve.origin import is_loopback

    if file is not None and (file.exists() or file.is_symlink()):
        found = read_keys(file)
        if found.warning:
            note(f"warning: {found.warning}")
        return found.hashes
    if file is not None:
        key = write_key(file)
        note(f"API key, also in {file}: {key}")
        return (hashed(key),)
    if is_loopback(host):
        return ()
    key = new_key()
    note(f"others can reach {host}, so clients need an API key. It is not kept and not shown again: {key}")
    note("(--api-key-file PATH keeps one)")
    return (hashed(key),)
