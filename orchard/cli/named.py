"""Things of the user's own, named on the command line: `module:Class`, `module:function`, `file.py:function`.

Naming one runs its module: that is what the user asked for, and nothing else makes Orchard run code of a folder it was
started in. Whatever goes wrong in it is told as the user's, not as ours.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from orchard.core.errors import OrchardError, UsageError


def looks_named(text: str) -> bool:
    """Whether a text names something in a module, rather than a file."""
    module, colon, name = text.rpartition(":")
    named = all(part.isidentifier() for part in name.split("."))
    return bool(colon) and bool(module) and named and not Path(text).exists()


def thing_named(text: str, what: str) -> Any:
    """The object that `module:name` or `file.py:name` stands for; `what` says what it is for, in errors."""
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{what} {text!r} is not module:name", hint="write it as package.module:name, or file.py:name")
    module = _module(module_name, what)
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            near = difflib.get_close_matches(part, [known for known in dir(thing) if not known.startswith("_")], n=1)
            hint = f"did you mean {near[0]}?" if near else f"look for its name in {module_name}"
            raise UsageError(f"{what}: {module_name} has no {part!r}", hint=hint)
        thing = getattr(thing, part)
    return thing


def _module(name: str, what: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return _from_file(Path(name), what) if name.endswith(".py") else importlib.import_module(name)
    except OrchardError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or name
        own = name == missing or name.startswith(f"{missing}.")
        hint = "run it from the folder that holds the module" if own else f"{name} itself needs {missing}"
        raise UsageError(f"{what}: no module called {missing!r}", hint=hint) from error
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{what}: importing {name} failed with {type(error).__name__}: {said}", hint="mend it"
        ) from error


def _from_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{what}: no file {path}", hint="check the path")
    name = f"orchard_user_{path.stem}"  # never a name that something else goes by
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{what}: {path} is no Python file", hint="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
