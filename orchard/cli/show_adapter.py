"""`orchard show FOLDER` of an adapter: what it is and which model it is for; a package is held against its sums on the way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from orchard.cli.common import human_bytes, print_json, printable
from orchard.core.errors import UsageError

CONFIG = "adapter_config.json"


def is_adapter(name: str) -> bool:
    """Whether this is the folder of an adapter, and not of a model."""
    folder = Path(name)
    return (folder / CONFIG).is_file() or (folder / "package.json").is_file()


def show_adapter(name: str, *, as_json: bool, other: bool) -> None:
    """`other`: something was asked for that only models have."""
    if other:
        raise UsageError(f"{name} is an adapter, without template, config tree or plan", hint="ask the model it is for")
    facts = adapter_facts(Path(name))
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def adapter_facts(path: Path) -> dict[str, Any]:
    """From a package's manifest, or from a plain folder's config; and from the header of the weights."""
    from orchard.weights.adapters import WEIGHTS
    from orchard.weights.mapped import json_object
    from orchard.weights.package import is_package, read_package
    from orchard.weights.safetensors import SafetensorsFile

    package = read_package(path) if is_package(path) else None
    config = json_object((path / CONFIG).read_bytes(), str(path / CONFIG))
    with SafetensorsFile.open(path / WEIGHTS) as file:
        maps = {tensor.rpartition(".lora_")[0] for tensor in file.tensors if ".lora_" in tensor}
        parameters = sum(math.prod(info.shape) for info in file.tensors.values())
    plain = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    signature = config.get("orchard_base")
    facts: dict[str, Any] = {
        "name": path.resolve().name,
        "kind": "package" if package else "adapter",
        "method": plain,
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "maps": len(maps),
        "parameters": parameters,
        "base": {"name": config.get("base_model_name_or_path"), "signature": signature},
        "bytes": sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        "path": str(path),
    }
    if package is not None:
        facts |= {"name": package.name, "method": package.method, "draft": package.draft is not None}
        facts |= {key: getattr(package, key) for key in ("author", "description", "licence", "created", "orchard")}
        facts["training"] = dict(package.training)
    return facts


def _print(facts: dict[str, Any]) -> None:
    signature = facts["base"]["signature"]
    signed = (
        f", signature {signature[2:14]}" if isinstance(signature, str) else ", unsigned: only its shapes can be checked"
    )
    lines = {
        "kind": f"{facts['kind']}, {facts['method']} of rank {facts['rank']} beside {facts['maps']} linear maps",
        "for": f"{facts['base']['name'] or 'a model without a name'}{signed}",
        "parameters": f"{facts['parameters']:,}",
        "size": human_bytes(facts["bytes"]) + (", every file has its sum" if facts["kind"] == "package" else ""),
        "draft": "a draft model comes with it" if facts.get("draft") else "",
        "about": facts.get("description", ""),
        "author": facts.get("author", ""),
        "licence": facts.get("licence", ""),
        "made": f"{facts['created'][:10]} with Orchard {facts['orchard']}" if facts.get("created") else "",
        "training": _training(facts.get("training") or {}),
        "path": facts["path"],
    }
    print(printable(str(facts["name"])))
    for label, value in lines.items():
        if value:
            print(printable(f"  {label:<11} {value}"))


def _training(training: dict[str, Any]) -> str:
    words = [f"{training[name]:,} {name}" for name in ("samples", "steps") if isinstance(training.get(name), int)]
    loss = training.get("loss")
    if isinstance(loss, dict) and all(isinstance(loss.get(when), float) for when in ("before", "after")):
        words.append(f"held-out loss {loss['before']:.4f} before, {loss['after']:.4f} after")
    answers = training.get("answers")
    if isinstance(answers, dict) and all(isinstance(answers.get(key), int) for key in ("asked", "before", "after")):
        words.append(f"answers right {answers['before']} of {answers['asked']} before, {answers['after']} after")
    return ", ".join(words)
