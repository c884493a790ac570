"""What a run leaves for people: its Report as JSON, as a page and as a picture of its curves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from orchard.core.errors import DiskFull, MissingExtra
from orchard.core.files import atomic_write, write_text
from orchard.core.report import Report
from orchard.core.report_page import page
from orchard.core.report_page_curves import charts
from orchard.core.report_png import png

JSON, PAGE, PICTURE = "report.json", "report.html", "curves.png"
FIRST_COST = 0.5
"""Seconds that keeping is thought to take before it was done once."""


def keep(report: Report, folder: Path) -> None:
    """Write `report.json`, `report.html` and `curves.png` into the folder, each whole or not at all.

    A full disk is `DiskFull`, with what was there before untouched: a run need not end for it. No Pillow, no picture.
    """
    write_text(folder / JSON, lines_of(report))
    drawn = charts(report.series)
    write_text(folder / PAGE, page(report, drawn))
    if drawn.charts:
        with suppress(MissingExtra):
            picture = png(report, drawn)
            with atomic_write(folder / PICTURE) as file:
                file.write(picture)


class Kept:
    """Keeps the Report of a run that goes on, as seldom as it must so that a run is not slowed down by being looked at.

    kept = Kept(folder); kept(trainer.report) after each checkpoint; kept(trainer.report, last=True) at the end
    """

    def __init__(self, folder: Path, *, share: float = 0.02, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: of the run's time that this may take. A Report is made only when it will be kept."""
        self.folder, self.share, self._clock = Path(folder), share, clock
        self.problem: str | None = None
        """Why the last one could not be written."""
        self._done, self._cost = clock(), FIRST_COST

    def __call__(self, make: Callable[[], Report], *, last: bool = False) -> bool:
        """Whether it was kept. A full disk (or one that may not be written) is no error here: the next time may do."""
        begun = self._clock()
        if not last and begun - self._done < self._cost / self.share:
            return False
        try:
            keep(make(), self.folder)
        except (DiskFull, OSError) as error:
            self.problem = str(error)
            return False
        finally:
            self._done = self._clock()
            self._cost = self._done - begun
        self.problem = None
        return True


def lines_of(report: Report) -> str:
    """The Report's JSON with each curve in one line: a number a line would be most of a long run's file."""
    record = report.to_dict()
    series: dict[str, list[object]] = record.pop("series")
    for ascii_only in (False, True):  # half of a surrogate pair: JSON can hold it only as an escape
        curves = [
            f"    {json.dumps(name, ensure_ascii=ascii_only)}: {json.dumps(points, ensure_ascii=ascii_only, allow_nan=False)}"
            for name, points in series.items()
        ]
        body = json.dumps(record, indent=2, ensure_ascii=ascii_only, allow_nan=False).removesuffix("\n}")
        text = "".join([body, ',\n  "series": {\n', ",\n".join(curves), "\n  }\n}\n"])
        with suppress(UnicodeEncodeError):
            text.encode()
            break
    return text
