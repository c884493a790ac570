"""A Report in a notebook: self-contained HTML. Every string is escaped, since a Report may come from anywhere."""

from __future__ import annotations

import html as escapes
from collections.abc import Sequence
from typing import Any

from orchard.core.report import Report
from orchard.core.report_text import beside, bound_text, label, measure, pairs, provenance, score, show, tidy

# Colours come from the page (currentColor), so the same text suits a light and a dark notebook.
_STYLE = """
.orchard-report{font:14px/1.45 system-ui,sans-serif;max-width:60rem;color:inherit}
.orchard-report table{border-collapse:collapse;width:100%;margin:.6rem 0;font-size:13px}
.orchard-report th,.orchard-report td{text-align:left;vertical-align:top;padding:.3rem .6rem;background:none;
border:0;border-bottom:1px solid color-mix(in srgb,currentColor 18%,transparent);white-space:normal}
.orchard-report th{font-weight:600;opacity:.7}
.orchard-report .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.orchard-report .q{opacity:.7}
.orchard-report b.yes,.orchard-report b.no{border-radius:.6rem;padding:.05rem .5rem;color:#fff;font-weight:600}
.orchard-report b.yes{background:#1a7f37}.orchard-report b.no{background:#b42318}
.orchard-report figure{display:inline-block;margin:.3rem 1.2rem .3rem 0}
.orchard-report figcaption{font-size:12px;opacity:.7}
"""


def html(report: Report) -> str:
    """Self-contained: no script, no address, every string escaped."""
    claims = [
        (
            beside(claim),
            show(claim.value),
            bound_text(claim.bound),
            ("holds" if claim.passed else "fails", claim.passed),
        )
        for claim in report.claims
    ]
    values = [(label(name), measure(value), value.note) for name, value in report.values.items()]
    parts = [
        f"<style>{_STYLE}</style>",
        f"<div><strong>{_escape(report.kind)} {_escape(report.name)}</strong> {_badge(score(report), report.passed)}</div>",
        _html_table(("claim", "measured", "bound", ""), claims) if claims else "",
        _html_table(("value", "measured", ""), values) if values else "",
        "".join(_chart(label(name), pairs(points)) for name, points in report.series.items()),
        "<ul>" + "".join(f"<li>{_escape(note)}</li>" for note in report.notes) + "</ul>" if report.notes else "",
        '<details class="q"><summary>Where this comes from</summary>',
        _html_table(("", ""), provenance(report)),
        "</details>",
    ]
    return f'<div class="orchard-report">{"".join(parts)}</div>'


def _escape(text: object) -> str:
    return escapes.escape(str(text), quote=True)


def _badge(text: str, good: bool) -> str:
    return f'<b class="{"yes" if good else "no"}">{_escape(text)}</b>'


def _html_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(i: int, item: Any) -> str:
        text = _badge(*item) if isinstance(item, tuple) else _escape(item)
        return f'<td class="n">{text}</td>' if i == 1 and len(head) > 2 else f"<td>{text}</td>"

    titles = "".join(f'<th class="n">{name}</th>' if i == 1 else f"<th>{name}</th>" for i, name in enumerate(head))
    body = "".join("<tr>" + "".join(cell(i, item) for i, item in enumerate(row)) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{titles}</tr></thead>' if any(head) else ''}<tbody>{body}</tbody></table>"


def _chart(name: str, points: Sequence[tuple[float, float]]) -> str:
    """A small line with its range; no axis that a reader would have to decode."""
    if len(points) < 2:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    wide, high = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0
    line = " ".join(f"{5 + 190 * (x - min(xs)) / wide:.1f},{55 - 50 * (y - min(ys)) / high:.1f}" for x, y in points)
    span = f"{show(tidy(min(ys)))} to {show(tidy(max(ys)))} over {show(tidy(min(xs)))} to {show(tidy(max(xs)))}"
    drawing = f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    picture = f'<svg viewBox="0 0 200 60" width="200" height="60" role="img">{drawing}</svg>'
    return f"<figure>{picture}<figcaption>{_escape(name)}: {_escape(span)}</figcaption></figure>"
