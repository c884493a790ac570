"""`orchard show NAME`: what a model or an adapter is, from headers alone; no weight is read (`--plan` packs one that is not)."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from orchard.cli.common import console, human_bytes, print_json, printable
from orchard.cli.options import JsonOption
from orchard.cli.show_adapter import is_adapter, show_adapter
from orchard.cli.show_compressed import compressed_facts, compressed_lines, compressed_table
from orchard.cli.show_embedding import embedding_facts, embedding_lines
from orchard.cli.show_plan import show_plan
from orchard.core.errors import UsageError

# The first pattern that matches a tensor's name says what kind it is; names of GGUF files and of Hugging Face folders.
KINDS = (
    ("norm", r"norm|LayerNorm"),
    ("router", r"ffn_gate_inp|mlp\.gate\.|block_sparse_moe\.gate\.|router"),
    ("experts", r"_exps\.|experts\."),
    ("attention", r"\.attn_|attention|self_attn"),
    ("mlp", r"\.ffn_|mlp\.|feed_forward|layer\.\d+\.(?:intermediate|output)\."),
    ("embedding", r"token_embd|embed_tokens|wte|embeddings\."),
    ("head", r"^output\.|lm_head"),
)


def show(
    name: Annotated[
        str, typer.Argument(help="A model of the library, a GGUF or .orchard file, a model folder or an adapter's.")
    ],
    template: Annotated[
        bool, typer.Option("--template", help="Print the whole chat template and nothing else.")
    ] = False,
    config: Annotated[bool, typer.Option("--config", help="Print the config tree and nothing else.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan that the native engine runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a model or an adapter is and what it is made of."""
    if is_adapter(name):
        show_adapter(name, as_json=as_json, other=template or config or plan)
        return
    from orchard.weights.library import Library

    library = Library()
    path = library.resolve(name)
    if template + config + plan > 1:
        raise UsageError("--template, --config and --plan are different things", hint="ask for one of them")
    if plan:
        show_plan(name, path, as_json=as_json)
        return
    if config:
        _print_config(name, path, as_json)
        return
    facts = {"name": name, "path": str(path)} | headers(path)
    entry = next((entry for entry in library.list() if entry.path in (path, path.parent)), None)
    if entry is not None:
        facts |= {"name": entry.name, "source": entry.source, "licence": entry.licence or facts["licence"]}
    if template and as_json:
        print_json({"name": facts["name"], "template": facts["template"]})
    elif template:
        print(printable(facts["template"]["text"] or ""))
    elif as_json:
        print_json(facts)
    else:
        _print(facts)


def headers(path: Path) -> dict[str, Any]:
    """Everything the headers say, as plain data. The readers are used directly: a checkpoint would bring torch with it."""
    if path.is_dir():
        from orchard.weights.folder import HFFolder

        with HFFolder.open(path) as folder:
            template = folder.chat_template or (folder.tokenizer_config or {}).get("chat_template")
            facts = _facts(path, "safetensors", folder.config, folder.tensors, template, "")
            return facts | embedding_facts(folder)
    from orchard.weights.compressed_file import CompressedFile, is_compressed

    if is_compressed(path):
        with CompressedFile.open(path) as compressed:
            words = compressed.tokenizer_facts()[0].get("chat_template")
            facts = _facts(path, "orchard", compressed.hf_config, {}, words, compressed.licence or "")
            return facts | compressed_facts(compressed)
    from orchard.weights.gguf.arch import file_config
    from orchard.weights.gguf.reader import GGUFFile

    with GGUFFile.open(path) as file:
        licence, template = file.metadata.get("general.license"), file.metadata.get("tokenizer.chat_template")
        known = licence if isinstance(licence, str) else ""
        return _facts(path, "gguf", file_config(file), file.tensors, template, known)


def _facts(
    path: Path, kind: str, config: dict[str, Any], tensors: Mapping[str, Any], template: Any, licence: str
) -> dict[str, Any]:
    from orchard.text.loaded import default_template, guarded

    def number(*keys: str) -> int | None:
        return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), None)

    width, heads = number("hidden_size"), number("num_attention_heads")
    kinds = _kinds(tensors)
    found = guarded("the chat template cannot be read", lambda: default_template(template))
    text = found and whole_text(found)
    return {
        "family": _family(config),
        "format": kind,
        "layers": number("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": number("num_key_value_heads") or heads,
        "head_width": number("head_dim") or (width // heads if width and heads else None),
        "experts": number("num_local_experts", "num_experts") or 0,
        "tracks": number("num_tracks") or 0,
        "track_depth": number("track_depth") or 0,
        "context": number("max_position_embeddings"),
        "vocabulary": number("vocab_size"),
        "parameters": sum(math.prod(info.shape) for info in tensors.values()),
        "bytes": _file_bytes(path),
        "quantisation": _quantisation(kinds),
        "tensors": kinds,
        "template": {"text": text, "sha256": hashlib.sha256(text.encode()).hexdigest() if text else None},
        "licence": licence,
    }


def _family(config: dict[str, Any]) -> str:
    """The family's name; one that is not among the common ones is looked up in the zoo, which takes torch."""
    from orchard.weights.gguf.arch import MODEL_TYPES
    from orchard.weights.sentence import is_encoder

    name = config.get("model_type")
    if name in MODEL_TYPES.values() or is_encoder(config):
        return str(name)
    from orchard.models.zoo import family_of

    return family_of(config).name


def _kinds(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Count, parameters and bytes of every kind of tensor and the type it is stored in."""
    table: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, info in tensors.items():
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")
        row = table[kind, _type(info)]
        row[0] += 1
        row[1] += math.prod(info.shape)
        row[2] += info.nbytes
    order = [kind for kind, _ in KINDS] + ["other"]
    rows = [
        {"kind": kind, "type": type_, "count": count, "parameters": parameters, "bytes": size}
        for (kind, type_), (count, parameters, size) in table.items()
    ]
    return sorted(rows, key=lambda row: (order.index(row["kind"]) or len(order), -row["bytes"]))  # norms last


def _type(info: Any) -> str:
    """A tensor's type. A folder may call one anything: what no type is called like is not repeated."""
    stored = getattr(info, "type", None)
    name = str(stored.name if stored is not None else info.dtype)
    return name if re.fullmatch(r"\w{1,16}", name, re.ASCII) else "unknown"


def whole_text(text: str) -> str:
    """JSON can spell halves of characters, which nothing can print or hash: each becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _quantisation(kinds: list[dict[str, Any]]) -> str:
    """The type that most parameters of the layers are stored in."""
    totals: dict[str, int] = defaultdict(int)
    layers = [row for row in kinds if row["kind"] in ("attention", "mlp", "experts")]
    for row in layers or kinds:
        totals[row["type"]] += row["parameters"]
    return max(totals, key=lambda type_: totals[type_]) if totals else ""


def _file_bytes(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and file.name != "orchard.json")


def _print_config(name: str, path: Path, as_json: bool) -> None:
    from orchard.session.shelf import is_embedder
    from orchard.weights.checkpoint import open_checkpoint
    from orchard.weights.encoder import open_encoder

    with open_encoder(path) if is_embedder(str(path)) else open_checkpoint(path) as checkpoint:
        tree = checkpoint.config().complete()
    if as_json:
        print_json({"name": name, "config": tree.to_dict()})
    else:
        print(tree.describe())


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table

    heads = f"{facts['heads']} of width {facts['head_width']}"
    if facts["kv_heads"] != facts["heads"]:
        heads += f", {facts['kv_heads']} for keys and values"
    layers = f"{facts['layers']} of width {facts['width']}"
    if facts["tracks"]:
        layers += f", each {facts['tracks']} tracks of {facts['track_depth']} layers"
        heads += ", in each track"
    text, digest = facts["template"]["text"], facts["template"]["sha256"]
    lines: dict[str, str] = {
        "family": facts["family"] + (f", {facts['experts']} experts a layer" if facts["experts"] else ""),
        "parameters": f"{_count(facts['parameters'])} ({facts['parameters']:,})",
        "layers": layers,
        "heads": heads,
        "context": f"{facts['context']:,} tokens" if facts["context"] else "not stated",
        "vocabulary": f"{facts['vocabulary']:,} tokens" if facts["vocabulary"] else "not stated",
        "size": f"{human_bytes(facts['bytes'])}, {facts['format']}, mostly {facts['quantisation']}",
        "template": f"{len(text):,} characters, sha256 {digest[:16]}… (--template prints it)" if text else "none",
        "licence": facts["licence"] or "not stated",
        "source": facts.get("source", ""),
        "path": facts["path"],
    }
    if "embedding" in facts:
        first = embedding_lines(facts["embedding"])
        lines = first | lines | first  # before the rest, and in place of what is there
    if "compressed" in facts:
        lines |= compressed_lines(facts)
    print(facts["name"])
    for label, value in lines.items():
        if value:
            print(printable(f"  {label:<11} {value}"))
    if "compressed" in facts:
        print()
        console().print(compressed_table(facts["compressed"]))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("  tensors")
    table.add_column("type")
    for title in ("count", "parameters", "bytes"):
        table.add_column(title, justify="right")
    for row in facts["tensors"]:
        sizes = (str(row["count"]), _count(row["parameters"]), human_bytes(row["bytes"]))
        table.add_row(f"  {row['kind']}", row["type"], *sizes)
    print()
    console().print(table)


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 100 * size else f"{number / size:.0f} {unit}"
    return str(number)
