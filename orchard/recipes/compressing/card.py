"""The card of a compressed model: markdown for people, and a table of what a plan will come to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchard.core.progress import lasting
from orchard.recipes.compressing.forecast import Forecast


def card(facts: dict[str, Any]) -> str:
    """What it is, from what, by which plan, how large, how good, how to run it, under which licence."""
    name = Path(facts["path"]).name
    size, before = facts["bytes"], facts["original_bytes"]
    lines = [
        *([f"---\nlicense: {facts['licence']}\n---\n"] if facts["licence"] else []),
        f"# {Path(facts['path']).stem}",
        "",
        f"{facts['model']}, made smaller by `orchard compress`: {mega(size)} instead of {mega(before)}, "
        f"{facts['bits_per_weight']:.2f} bits per weight (the whole file over the original's weights).",
        "",
        "## How to run it",
        "",
        "```",
        f"orchard chat --model {name}",
        f"orchard serve --model {name}",
        "```",
        "",
        "## How it was made",
        "",
        "```",
        f"orchard compress {facts['model']} {' '.join(facts['plan'])}" + _options(facts),
        "```",
        "",
        *_table(
            ("step", "MB", "bits per weight", "tokens learnt from", "loss ratio", "KL", "same likeliest token"),
            [_row(one) for one in facts["steps"]],
        ),
        "",
    ]
    if facts["stopped"]:
        lines += [f"It was stopped ({facts['stopped']}); this is the model after step {facts['kept_steps']}.", ""]
    lines += ["## What was measured", "", _measured_on(facts), ""]
    lines += _table(
        ("text", "tokens", "loss", "the original's", "ratio", "KL (nats)", "same likeliest token"),
        [
            (
                kind,
                f"{one['tokens']:,}",
                *(_number(one[key]) for key in ("loss", "reference", "ratio", "kl")),
                f"{one['agreement']:.1%}",
            )
            for kind, one in {**facts["measured"]["kinds"], "all": facts["measured"]["all"]}.items()
        ],
    )
    if facts["measured"]["tasks"]:
        rows = [
            (task, f"{score:.1%}", f"{facts['original_tasks'].get(task, 0):.1%}")
            for task, score in facts["measured"]["tasks"].items()
        ]
        lines += ["", *_table(("task", "answered right", "by the original"), rows)]
    kv = (facts["kv_bytes_per_token"], facts["original_kv_bytes_per_token"])
    lines += [
        "",
        "## Where the bytes are",
        "",
        *_table(("part", "bytes"), _parts(facts["accounting"])),
        "",
        f"Keys and values: {kv[0]:,} bytes a token (the original: {kv[1]:,}, in bfloat16). One token reads "
        f"{mega(facts['bytes_read_per_token'])} of weights "
        f"(the original in bfloat16: {mega(facts['original_bytes_read_per_token'])}).",
        "",
        "## Licence",
        "",
        (
            f"The original's: {facts['licence']}."
            if facts["licence"]
            else "That of the original, whose files do not say which it is."
        ),
    ]
    return "\n".join(lines) + "\n"


def shown(found: Forecast) -> str:
    """What a plan will come to, as a table for a terminal."""
    rows = [("original", _size(found.original.file), f"{found.original.bits:.2f}", f"{found.original.kv:,}", "", "1")]
    for one in found.steps:
        spread = one.least.file != one.most.file
        size = f"{one.least.file / 1e6:,.4g}-{_size(one.most.file)}" if spread else _size(one.most.file)
        bits = f"{one.least.bits:.2f}-{one.most.bits:.2f}" if spread else f"{one.most.bits:.2f}"
        tokens = f"{one.tokens:,}" if one.tokens else ""
        rows.append((one.step.words, size, bits, f"{one.most.kv:,}", tokens, f"{one.guess[0]:.2f}-{one.guess[1]:.2f}"))
    lines = columns(("step", "file", "bits per weight", "kv bytes/token", "tokens", "loss ratio (guess)"), rows)
    last = found.size
    if found.budget is not None:
        lines.append(
            f"budget       {mega(found.budget)}; the plan ends in at most {mega(last.file)} ({last.bits:.2f} bits per weight)"
        )
    if found.speed is not None:
        before, after = found.speed
        lines.append(
            f"decoding     about {after:,.0f} tokens a second at most, the original {before:,.0f} in bfloat16 "
            "(an estimate: weights over what memory gives)"
        )
    if found.seconds is not None:
        lines.append(
            f"learning     {found.tokens:,} tokens, about {lasting(found.seconds)} (an estimate), and writing them"
        )
    lines += [f"note         {note}" for note in found.notes]
    return "\n".join(lines)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned: the first column to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def mega(size: float) -> str:
    return f"{size / 1e6:,.4g} MB"


# Inside -----------------------------------------------------------------------------------------------------------------


def _size(size: int) -> str:
    return mega(size)


def _options(facts: dict[str, Any]) -> str:
    found = f" --to {Path(facts['path']).name}"
    if facts["budget_bytes"] is not None:
        found += f" --budget {facts['budget_bytes']}B"
    found += "".join(f' --stop "{rule}"' for rule in facts["stop"])
    return found + (f" --tokens {facts['expected']['tokens']}" if facts["expected"]["tokens"] else "")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    size, found = one["size"], one["measured"]["all"]
    return (
        f"`{one['step']}`",
        f"{size['bytes'] / 1e6:,.4g}",
        f"{size['bits_per_weight']:.2f}",
        f"{one['tokens']:,}" if one["tokens"] else "",
        _number(found["ratio"]),
        _number(found["kl"]),
        f"{found['agreement']:.1%}",
    )


def _measured_on(facts: dict[str, Any]) -> str:
    what = ["text that the original wrote itself (`plain`, `chat`)"]
    if facts["text"]:
        what.append("pieces of the given files (`text`)")
    return (
        f"The file itself, against the original, on {' and '.join(what)} that nothing was learnt from. Text of other kinds may "
        "suffer more."
    )


def _parts(accounting: dict[str, Any]) -> list[tuple[str, str]]:
    from orchard.weights.compressed_bits import Accounting

    found = Accounting.from_dict(accounting)
    assert found is not None
    return [*((name, f"{size:,}") for name, size, _ in found.rows()), ("all", f"{found.total:,}")]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|".join("---" if not place else "---:" for place in range(len(head)))
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4f}"
