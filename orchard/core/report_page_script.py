"""The style and the script of a Report's page. Both are fixed texts: nothing of a Report is ever put into them.

The page allows exactly this script by its digest and loads nothing from anywhere, so that text from a Report could not run even
if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root{color-scheme:light dark;--page:#fbfbf9;--card:#fff;--text:#1d211f;--quiet:#646c67;--rule:#e2e5e0;--good:#1a7f37;
--bad:#b42318;
--c0:#23784a;--c1:#c2701b;--c2:#3f66b0;--c3:#a03c78;--c4:#7a6a10;--c5:#1d8391}
@media(prefers-color-scheme:dark){:root{--page:#141715;--card:#1b1f1c;--text:#e4e8e4;--quiet:#98a29b;--rule:#303732;
--good:#2f9e51;
--bad:#d9503f;--c0:#5cc98c;--c1:#eda556;--c2:#86aaf0;--c3:#e08dbd;--c4:#cfbd53;--c5:#5cc4d3}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1160px;margin:0 auto;padding:1.6rem 1.2rem 3rem}
h1{font-size:1.55rem;line-height:1.2;margin:0 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1rem;margin:2rem 0 .5rem}
h1 small{font-weight:400;color:var(--quiet)}
.q{color:var(--quiet)}
.badge{border-radius:1rem;padding:.1rem .6rem;color:#fff;font-size:.8rem;font-weight:600;white-space:nowrap}
.yes{background:var(--good)}.no{background:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;margin:1.1rem 0}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:.5rem;padding:.55rem .75rem;
overflow-wrap:anywhere}
.tiles b{display:block;font-size:1.1rem;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr));gap:.8rem;margin-top:1.1rem}
.chart{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:.5rem;padding:.7rem .9rem .5rem;
position:relative;
min-width:0;container-type:inline-size;outline-offset:1px;display:flex;flex-direction:column;justify-content:space-between}
.chart.main{grid-column:1/-1}
.chart figcaption{display:flex;flex-wrap:wrap;gap:0 .9rem;font-size:.84rem;align-items:baseline}
.chart figcaption b{font-size:.92rem;overflow-wrap:anywhere}
.said{flex-basis:100%;height:1.5em;color:var(--quiet);font-variant-numeric:tabular-nums;overflow:hidden;
text-overflow:ellipsis;white-space:nowrap}
.key::before{content:"";display:inline-block;width:.9rem;height:.2rem;border-radius:1px;margin-right:.35rem;
vertical-align:middle;background:var(--c)}
.plot{display:grid;grid-template:12rem 1.5rem/calc(var(--gutter) + 1.1ch) 1fr;font-size:.75rem;
font-variant-numeric:tabular-nums;margin-top:.45rem}
.main .plot{grid-template-rows:22rem 1.5rem}
.area,.ys,.xs{position:relative;min-width:0}
.plot i{position:absolute;font-style:normal;color:var(--quiet);white-space:nowrap;line-height:1}
.ys i{right:1.1ch;transform:translateY(-50%)}
.xs i{top:.5rem;transform:translateX(-50%)}
.xs i.end{transform:translateX(-100%)}
.x{color:var(--quiet);padding-top:.28rem;text-align:right;padding-right:1.1ch;overflow:visible;white-space:nowrap;
direction:rtl}
.chart svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;clip-path:inset(0 -6px -1px);
border-bottom:1px solid var(--quiet)}
.chart path{fill:none;vector-effect:non-scaling-stroke;stroke:var(--c);stroke-linejoin:round;stroke-linecap:round}
.chart path.grid{stroke:var(--rule);stroke-width:1px}
.line{stroke-width:1.8px}.raw{stroke-width:1px;opacity:.26}.dots{stroke-width:5px}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.bar{position:absolute;top:0;bottom:0;width:1px;background:var(--quiet);pointer-events:none}
.spot{position:absolute;width:9px;height:9px;margin:-4.5px;border-radius:50%;background:var(--c);border:2px solid var(--card);
pointer-events:none}
.wrap{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.87rem}
th,td{text-align:left;vertical-align:top;padding:.35rem .8rem .35rem 0;border-bottom:1px solid var(--rule);
overflow-wrap:break-word}
th{font-weight:600;color:var(--quiet)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;overflow-wrap:normal}
td:first-child,td:last-child{min-width:6rem;overflow-wrap:anywhere}
details>summary{cursor:pointer;border-radius:.2rem}
details.part{margin-top:1.4rem;border-top:1px solid var(--rule);padding-top:.7rem}
details.part>summary{font-weight:600}
.tree{font:.82rem/1.55 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.tree details,.tree p{margin:0 0 0 1.15rem}
.tree p{padding-left:.9rem}
.tree em{font-style:normal;color:var(--c2)}
@container(max-width:30rem){.crowded i.odd{display:none}}
@container(max-width:15rem){i.odd{display:none}}
@container(max-width:40rem){.main .said{height:4.5em;white-space:normal}.main .plot{grid-template-rows:15rem 1.5rem}}
.claims td:last-child{min-width:0}
@media(max-width:36rem){.claims thead{display:none}.claims tr{display:grid;grid-template-columns:auto auto 1fr;padding:.4rem 0;
border-bottom:1px solid var(--rule)}.claims td{border:0;padding:.1rem 1rem .1rem 0}.claims td:first-child{grid-column:1/-1}}
@media print{body{background:#fff}.said{display:none}}
"""

SCRIPT = """
"use strict";
(() => {
  const charts = [...document.querySelectorAll(".chart")].map(figure => {
    const [name, x, y, lines] = JSON.parse(figure.dataset.chart);
    return {figure, name, x, y, lines, area: figure.querySelector(".area"), said: figure.querySelector(".said"), marks: []};
  });
  const words = value => {
    const size = Math.abs(value);
    if (size && (size >= 1e15 || size < 1e-4)) return value.toExponential(3);
    return value.toLocaleString("en", size >= 1e4 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 5});
  };
  const place = ([low, high, log], value) =>
    log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  const nearest = (xs, at) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= at) low = middle; else high = middle;
    }
    return at - xs[low] <= xs[high] - at ? low : high;
  };
  const mark = (chart, kind, left, top) => {
    const made = document.createElement("div");
    made.className = kind;
    made.style.left = 100 * left + "%";
    if (top !== undefined) made.style.top = 100 * (1 - top) + "%";
    chart.area.append(made);
    chart.marks.push(made);
  };
  const clear = chart => {
    chart.marks.splice(0).forEach(made => made.remove());
    chart.said.textContent = "";
  };
  const show = (chart, at) => {
    clear(chart);
    if (at < chart.x[0] || at > chart.x[1]) return;
    const [, xs] = chart.lines[0], x = xs[nearest(xs, at)];
    const parts = [chart.name + " " + words(x)];
    mark(chart, "bar", place(chart.x, x));
    chart.lines.forEach(([name, xs, ys, means], index) => {
      const found = nearest(xs, x), mean = means.length ? ", mean " + words(means[found]) : "";
      const other = xs[found] === x ? "" : " at " + words(xs[found]);
      parts.push((chart.lines.length > 1 ? name + " " : "") + words(ys[found]) + mean + other);
      const high = place(chart.y, means.length ? means[found] : ys[found]);
      if (high >= 0 && high <= 1) mark(chart, "spot c" + index % 6, place(chart.x, xs[found]), high);
    });
    chart.said.textContent = parts.join(" \\u00b7 ");
  };
  const alike = (one, other) => one === other || (one.name === other.name && one.name !== "x");
  charts.forEach(chart => {
    let at = chart.x[1];
    const all = what => charts.filter(other => alike(chart, other)).forEach(what);
    const go = to => {
      at = Math.min(chart.x[1], Math.max(chart.x[0], to));
      all(other => show(other, at));
    };
    chart.area.addEventListener("pointermove", event => {
      const box = chart.area.getBoundingClientRect();
      go(chart.x[0] + (chart.x[1] - chart.x[0]) * (event.clientX - box.left) / box.width);
    });
    chart.area.addEventListener("pointerleave", () => all(clear));
    chart.figure.addEventListener("blur", () => all(clear));
    chart.figure.addEventListener("keydown", event => {
      const xs = chart.lines[0][1], now = nearest(xs, at);
      const moves = {ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1};
      if (!(event.key in moves)) return;
      event.preventDefault();
      go(xs[Math.min(xs.length - 1, Math.max(0, moves[event.key]))]);
    });
  });
})();
"""


def policy() -> str:
    """What a browser may do with the page: run this one script, use its style, load nothing."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
