"""The model at a path: a file, or what a folder holds."""

from __future__ import annotations

from pathlib import Path

from orchard.core.errors import BadFile, ModelNotFound, UsageError

ENDINGS = (".gguf", ".orchard")
"""How the names of models end that are one file."""


def model_at(path: Path) -> Path | None:
    """The model at a path: a file, or what a folder holds."""
    try:
        path = path.expanduser()
        if path.is_dir():
            return _folder_model(path)
        if path.is_file():
            if path.suffix == ".safetensors" or path.name == "config.json":
                raise UsageError(f"{path} is one file of a model folder", hint=f"name the folder: {path.parent}")
            return path
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of somebody who is not there
        shown, why = str(path)[:200], getattr(error, "strerror", error)
        raise BadFile(f"{shown} cannot be read: {why}", hint="check the path and its permissions") from error
    return None


def _folder_model(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(file for ending in ENDINGS for file in folder.glob(f"*{ending}"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelNotFound(f"{folder} holds {len(files)} model files", hint=f"name one of them, such as {files[0]}")
    if (folder / "parts.json").is_file():
        hint = f"parts are joined by their model's name: {folder.name} (where ORCHARD_WEIGHTS is {folder.parent})"
        raise ModelNotFound(f"{folder} holds a model in parts", hint=hint)
    hint = "a model folder has config.json and *.safetensors, or a GGUF file"
    raise ModelNotFound(f"{folder} holds no model", hint=hint)
