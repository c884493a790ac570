"""`orchard show` of a compressed file: where its bytes are, to the byte, and what they come to for each weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchard.cli.common import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from orchard.weights.compressed_file import CompressedFile


def compressed_facts(file: CompressedFile) -> dict[str, Any]:
    """What only a compressed file says: its accounting, what keys and values cost, how it was made."""
    counted = file.accounting
    weights = sorted(counted.weights, key=lambda name: -counted.weights[name])
    made = {name: file.made[name] for name in ("from", "plan") if isinstance(file.made.get(name), str | list)}
    return {
        "parameters": counted.dense,
        "bytes": counted.total,
        "quantisation": " + ".join(weights),
        "layers": _layers(file),
        "compressed": counted.to_dict()
        | {"parts": [{"part": part, "bytes": size, "bits_per_weight": bits} for part, size, bits in counted.rows()]},
        "made": made,
    }


def compressed_lines(facts: dict[str, Any]) -> dict[str, str]:
    """Labels and lines for a person, in the place of those that every model has."""
    counted, made = facts["compressed"], facts["made"]
    plan = made.get("plan", "")
    lines = {
        "parameters": f"{facts['parameters']:,} before anything was shared, pruned or packed",
        "size": f"{human_bytes(facts['bytes'])}, orchard, {counted['bits_per_weight']:.3f} bits per weight, all in",
        "cache": f"{counted['kv_bytes_per_token']:,} bytes of keys and values per token",
        "made": ", ".join(map(str, plan))[:200] if isinstance(plan, list) else str(plan)[:200],
        "from": str(made.get("from", ""))[:200],
    }
    return {label: line for label, line in lines.items() if line}


def compressed_table(counted: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("  part")
    table.add_column("bytes", justify="right")
    table.add_column("bits per weight", justify="right")
    for row in counted["parts"]:
        table.add_row(f"  {_plain(row['part'])}", f"{row['bytes']:,}", f"{row['bits_per_weight']:.4f}")
    table.add_row("  all, the file", f"{counted['total']:,}", f"{counted['bits_per_weight']:.4f}", style="bold")
    return table


def _layers(file: CompressedFile) -> int | None:
    """As many as the tree has; the config of the original may say another number."""
    stack = file.tree.get("stack")
    layers = stack.get("layers") if isinstance(stack, dict) else None
    return len(layers) if isinstance(layers, list) else None


def _plain(text: str) -> str:
    """Names of formats come from the file: brackets are markup to the table, and what cannot be printed is not."""
    return "".join(letter if letter.isalnum() or letter in " ,_-" else "?" for letter in text)[:60]
