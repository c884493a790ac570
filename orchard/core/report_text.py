"""Reports as text: a table for the terminal, a Markdown card, and the words that both and the HTML share."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchard.core.report import Bound, Report, Scalar, Value, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(value: Scalar) -> str:
    """A value as people read it: four significant digits, thousands apart."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return value


def bound_text(bound: Bound) -> str:
    sign = {"<=": "≤", ">=": "≥", "==": "=", "!=": "≠"}.get(bound.op, bound.op)
    return f"{sign} {show(bound.limit)}"


def measure(value: Value) -> str:
    text = f"{show(value.value)} {value.unit}".strip()
    if value.low is None and value.high is None:
        return text
    return f"{text} ({show(value.low)} to {show(value.high)})"


def label(name: str) -> str:
    return name.replace("_", " ")


def pairs(points: Sequence[Any]) -> list[tuple[float, float]]:
    """Points as (x, y): given so, or numbers counted from 0. Anything else is not drawn."""
    pairs = [point if isinstance(point, list) else [i, point] for i, point in enumerate(points)]
    fine = [pair for pair in pairs if len(pair) == 2 and all(isinstance(x, (int, float)) for x in pair)]
    return [(float(x), float(y)) for x, y in fine]


def provenance(report: Report) -> list[tuple[str, str]]:
    """Where the numbers come from, as (label, text); what is not known is left out."""
    machine = report.hardware
    memory = machine.get("memory_bytes")
    parts = [
        machine.get("cpu"),
        f"{machine['cores']} cores" if "cores" in machine else None,
        f"{memory / 2**30:.0f} GiB" if isinstance(memory, (int, float)) else None,
        " ".join(map(str, machine["flags"])) if isinstance(machine.get("flags"), list) else None,
        machine.get("accelerator"),
        machine.get("os"),
        f"Python {machine['python']}" if "python" in machine else None,
    ]
    rows = [
        ("command", report.command),
        ("commit", report.commit or ""),
        ("created", report.created),
        ("seed", "" if report.seed is None else str(report.seed)),
        ("took", "" if report.wall_time is None else f"{report.wall_time:.3g} s"),
        ("machine", ", ".join(str(part) for part in parts if part)),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
    ]
    return [(fact, text) for fact, text in rows if text]


def score(report: Report) -> str:
    held = sum(claim.passed for claim in report.claims)
    return f"{held} of {len(report.claims)} claims hold" if report.claims else "no claims"


def beside(claim: Verdict) -> str:
    """A claim's statement, with what else is known about its outcome."""
    more = [f"baseline {show(claim.baseline)}"] if claim.baseline is not None else []
    more += [claim.reason] if claim.reason else []
    return f"{claim.statement} ({'; '.join(more)})" if more else claim.statement


def table(report: Report) -> RenderableType:
    """Claims, values, notes and origin, readable at 80 columns."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Styled

    def line(text: str, style: str = "") -> Styled:
        # Text from a file must not steer the terminal.
        return Styled("".join(c if c.isprintable() or c == "\n" else "·" for c in text), style, overflow="fold")

    style = "bold green" if report.passed else "bold red"
    parts: list[RenderableType] = [
        Styled.assemble(line(f"{report.kind} {report.name}", "bold"), "  ", (score(report), style))
    ]
    if report.claims:
        claims = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
        claims.add_column("claim", ratio=1, overflow="fold")
        claims.add_column("value", justify="right", overflow="fold")
        claims.add_column("bound", no_wrap=True)
        claims.add_column("", no_wrap=True)
        for claim in report.claims:
            mark = line("holds", "green") if claim.passed else line("FAILS", "bold red")
            claims.add_row(line(beside(claim)), line(show(claim.value)), line(bound_text(claim.bound)), mark)
        parts.append(claims)
    if report.values:
        values = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
        values.add_column("value", ratio=1, overflow="fold")
        values.add_column("measured", justify="right", overflow="fold")
        for name, value in report.values.items():
            cell = Styled.assemble(line(label(name)), "  ", line(value.note, "dim"))
            values.add_row(cell, line(measure(value)))
        parts.append(values)
    parts += [line(f"• {note}") for note in report.notes]
    origin = Table.grid(padding=(0, 2))
    for fact, text in provenance(report):
        origin.add_row(line(fact, "dim"), line(text, "dim"))
    return Group(*parts, line(""), origin)


def card(report: Report, docstring: str = "") -> str:
    """A card. With a docstring it opens with that text and its first line as the title."""
    title, _, about = inspect.cleandoc(docstring).partition("\n")
    parts = [f"# {title.rstrip('.')}", about.strip(), "## Last run"] if docstring else []
    parts.append(f"**{score(report)}.**")
    if report.claims:
        rows = [(beside(c), show(c.value), bound_text(c.bound), "yes" if c.passed else "**no**") for c in report.claims]
        parts.append(_markdown_table(("claim", "measured", "bound", "holds"), rows))
    if report.values:
        cells = [(label(name), measure(value), value.note) for name, value in report.values.items()]
        parts.append(_markdown_table(("value", "measured", "note"), cells))
    for name, points in report.series.items():
        drawn = ", ".join(f"{show(tidy(x))} → {show(tidy(y))}" for x, y in pairs(points))
        parts.append(f"{_markdown(label(name))}: {drawn}" if drawn else "")
    parts.append("\n".join(f"- {_markdown(note)}" for note in report.notes))
    parts.append(_markdown_table(("", ""), provenance(report)))
    return "\n\n".join(part for part in parts if part) + "\n"


def tidy(number: float) -> int | float:
    return int(number) if number.is_integer() else number


def _markdown(text: str) -> str:
    """Text that means itself inside a Markdown table or list; code spans stay."""
    clean = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return clean.replace("|", "\\|").replace("[", "\\[").replace("]", "\\]")


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_markdown(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
