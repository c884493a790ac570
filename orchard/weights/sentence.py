"""What the small files of an embedding model say: how long a text may be, and how a vector is made of its tokens.

The layout is that of the sentence-transformers package: `modules.json` lists the steps (an encoder, a pooling, perhaps a
normalisation), and each step has a `config.json` in a folder of its own. A step that we do not have is refused: vectors made
without it would look right and mean nothing. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchard.core.errors import BadFile, UnsupportedFormat, UsageError
from orchard.core.files import safe_join
from orchard.weights.folder import HFFolder
from orchard.weights.mapped import AGAIN

ENCODERS = frozenset({"bert"})
"""Families (`model_type`) that turn texts into vectors."""
MODULES = "modules.json"
POOLINGS = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "first",
    "cls_token": "first",
    "max": "max",
    "max_tokens": "max",
}
"""Their names for a pooling, old and new, and ours."""
_FLAG = "pooling_mode_"
_MOST_TOKENS = 1 << 24  # files without a limit of their own say 10³⁰


class WritesNoText(UsageError):
    """An embedding model was asked to write."""

    code = "embedding-model"


class MakesNoVectors(UsageError):
    """A model that writes was asked for vectors."""

    code = "not-an-embedding-model"


@dataclass(frozen=True)
class Sentence:
    """From tokens to a vector, as the files say. `pooling` is mean, first or max."""

    dim: int
    max_tokens: int
    pooling: str = "mean"
    lowercase: bool = False


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face config is that of a model that makes vectors and does not write."""
    return isinstance(config.get("model_type"), str) and config["model_type"] in ENCODERS


def refuse_encoder(config: Mapping[str, Any], name: str) -> None:
    """Called where a language model is needed."""
    if is_encoder(config):
        raise WritesNoText(
            f"{name} turns texts into vectors; it does not write",
            hint=f"use orchard.embedder({name!r}) for vectors, and a language model such as smollm2 to write",
        )


def sentence_of(folder: HFFolder) -> Sentence:
    """Read all the small files of an open folder. One without `modules.json` is a bare encoder: the mean of its tokens."""
    config, limits = folder.config, folder.json("sentence_bert_config.json") or {}
    places = _whole(config, "max_position_embeddings", 512)
    stated = _whole(limits, "max_seq_length") or _whole(folder.tokenizer_config or {}, "model_max_length")
    lowercase = limits.get("do_lower_case", False)
    if type(lowercase) is not bool:
        raise BadFile(f"do_lower_case is {lowercase!r:.40}, not true or false", hint=AGAIN)
    prompt = (folder.json("config_sentence_transformers.json") or {}).get("default_prompt_name")
    if prompt is not None:
        raise UnsupportedFormat(
            f"{folder.path.name} puts a prompt of its own ({prompt!r:.40}) before every text, which is not done here",
            hint="set default_prompt_name to null, and put the prompt before your texts yourself",
        )
    dim = _whole(config, "hidden_size", 768)
    assert places is not None and dim is not None  # they have defaults
    return Sentence(dim, min(places, stated or _MOST_TOKENS), _pooling(folder), lowercase)


def _pooling(folder: HFFolder) -> str:
    path = next((path for kind, path in _modules(folder) if kind == "Pooling"), None)
    if path is None:
        return "mean"
    name = f"{path}/config.json"
    safe_join(folder.path, name)
    found = folder.json(name)
    if found is None:
        raise BadFile(f"{folder.path.name} lacks {name}, which {MODULES} names", hint=AGAIN)
    named = found.get("pooling_mode")  # newer files name it; older ones have a switch for each
    switched = [key.removeprefix(_FLAG) for key, on in found.items() if key.startswith(_FLAG) and on is True]
    chosen = [named] if isinstance(named, str) else named if isinstance(named, list) else switched
    if len(chosen) != 1 or not isinstance(chosen[0], str) or chosen[0] not in POOLINGS:
        what = " and ".join(map(str, chosen))[:80] or "nothing"
        raise UnsupportedFormat(f"{name} asks for a pooling by {what}", hint="known: one of mean, cls and max")
    return POOLINGS[chosen[0]]


def _modules(folder: HFFolder) -> list[tuple[str, str]]:
    """(kind, path) of every step. Only what can be done is let through, in the one order that makes sense."""
    text = folder.text(MODULES)
    if text is None:
        return []
    try:
        listed = json.loads(text)
        found = [(str(step["type"]).rpartition(".")[2], str(step["path"])) for step in listed]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadFile(f"{folder.path / MODULES} is not a list of modules: {error!r:.80}", hint=AGAIN) from None
    kinds = [kind for kind, _ in found]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or found[0][1]:
        raise UnsupportedFormat(
            f"{MODULES} lists {', '.join(kinds)[:120] or 'nothing'}",
            hint="known: Transformer (in the folder itself), Pooling, and perhaps Normalize",
        )
    return found


def _whole(table: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """A positive whole number; the default where it is missing or null."""
    value = table.get(name)
    if value is None:
        return default
    if type(value) is float and value.is_integer():  # 1e30 stands for "no limit"
        value = int(value)
    if type(value) is not int or value < 1:
        raise BadFile(f"{name} is {value!r:.40}, not a whole number from 1", hint=AGAIN)
    return value
