"""A Report as a page of its own: charts, claims, values, config, where it comes from. For any Report, whatever made it.

One file that loads nothing, light or dark as the reader likes it, for wide screens, telephones and paper. Every string is
escaped, since a Report may come from anywhere. What is too long for a page (thousands of notes, a config of a hundred equal
layers) is shortened, and the page says so: the whole of it is in the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchard.core.progress import lasting
from orchard.core.report import Report
from orchard.core.report_page_chart import chart_html, escape
from orchard.core.report_page_curves import Drawn, charts
from orchard.core.report_page_script import SCRIPT, STYLE, policy
from orchard.core.report_page_tree import tree_html
from orchard.core.report_text import beside, bound_text, label, measure, provenance, score, show

MOST_ROWS = 400
MOST_NOTES = 60
MOST_TEXT = 2000
"""Letters of one text."""
TILES = 8


def page(report: Report, drawn: Drawn | None = None) -> str:
    """The whole HTML file. `drawn`: the charts, where they are known already."""
    title = f"{report.kind} {report.name}"
    training = report.kind == "train"
    drawn = charts(report.series) if drawn is None else drawn
    parts = [
        _head(report),
        _tiles(report) if training else "",
        _claims(report),
        _charts(drawn, fold=not training),
        _values(report),
        _texts(report, drawn),
        _notes(report.notes),
        _part("Config", f'<div class="tree">{tree_html(report.config)}</div>') if report.config else "",
        _part("Where this comes from", _table(("", ""), provenance(report))),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy())}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _head(report: Report) -> str:
    badge = _badge(score(report), report.passed) if report.claims else ""
    took = "" if report.wall_time is None else f" · took {lasting(report.wall_time)}"
    machine = dict(provenance(report)).get("machine", "")
    under = f'<div class="q">{_text(report.created)}{took}{f" · {_text(machine)}" if machine else ""}</div>'
    return f"<header><h1>{_text(report.name)} <small>{_text(report.kind)}</small> {badge}</h1>{under}</header>"


def _tiles(report: Report) -> str:
    """The first values, large."""
    first = list(report.values.items())[:TILES]
    shown = [(name, f"{show(value.value)} {'' if value.unit == name else value.unit}".strip()) for name, value in first]
    tiles = [f'<div><span class="q">{_text(label(name))}</span><b>{_text(value)}</b></div>' for name, value in shown]
    return f'<section class="tiles">{"".join(tiles)}</section>' if tiles else ""


def _claims(report: Report) -> str:
    rows = [
        (
            beside(claim),
            show(claim.value),
            bound_text(claim.bound),
            ("holds" if claim.passed else "fails", claim.passed),
        )
        for claim in report.claims
    ]
    table = _table(("claim", "measured", "bound", ""), rows)
    return f'<h2>Claims</h2><div class="claims">{table}</div>' if rows else ""


def _charts(drawn: Drawn, *, fold: bool) -> str:
    if not drawn.charts:
        return ""
    more = f'<p class="q">Not drawn: {_text(", ".join(drawn.left))}</p>' if drawn.left else ""
    body = f'<section class="charts">{"".join(chart_html(chart) for chart in drawn.charts)}</section>{more}'
    # Many small charts of a benchmark are for those who ask; the curves of a run are what a page of it is for.
    return _part(f"Curves ({len(drawn.charts)})", body) if fold and len(drawn.charts) > 12 else body


def _values(report: Report) -> str:
    rows = [(label(name), measure(value), value.note) for name, value in report.values.items()]
    return f"<h2>Values</h2>{_table(('value', 'measured', ''), rows)}" if rows else ""


def _texts(report: Report, drawn: Drawn) -> str:
    """Series that are no curves: lists of words, rows of several columns."""
    parts = []
    for name, points in report.series.items():
        if not points or name in drawn.names:
            continue
        width = max((len(point) for point in points if isinstance(point, list)), default=1)
        rows = [
            [*map(_plain, point), *[""] * (width - len(point))] if isinstance(point, list) else [_plain(point)]
            for point in points
        ]
        parts.append(_part(f"{label(name)} ({len(points):,})", _table(("",) * width, rows)))
    return "".join(parts)


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    more = f'<li class="q">and {len(notes) - MOST_NOTES:,} more, in the JSON</li>' if len(notes) > MOST_NOTES else ""
    return f"<h2>Notes</h2><ul>{''.join(f'<li>{_text(note)}</li>' for note in notes[:MOST_NOTES])}{more}</ul>"


def _part(title: str, body: str) -> str:
    return f'<details class="part"><summary>{_text(title)}</summary>{body}</details>'


def _badge(text: str, good: bool) -> str:
    return f'<span class="badge {"yes" if good else "no"}">{_text(text)}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(index: int, item: Any) -> str:
        text = _badge(*item) if isinstance(item, tuple) else _text(item)
        return f'<td class="n">{text}</td>' if index == 1 and head[1] else f"<td>{text}</td>"

    titles = "".join(
        f'<th class="n">{name}</th>' if index == 1 else f"<th>{name}</th>" for index, name in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(cell(i, item) for i, item in enumerate(row))}</tr>" for row in rows[:MOST_ROWS])
    more = f'<p class="q">and {len(rows) - MOST_ROWS:,} more, in the JSON</p>' if len(rows) > MOST_ROWS else ""
    top = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class="wrap"><table>{top}<tbody>{body}</tbody></table></div>{more}'


def _text(text: object) -> str:
    whole = str(text)
    return escape(whole if len(whole) <= MOST_TEXT else f"{whole[:MOST_TEXT]} …")


def _plain(value: Any) -> str:
    """A cell of a row: numbers as people read them, anything deeper as it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return show(value)
    return f"{len(value)} fields" if isinstance(value, Mapping) else str(value)
