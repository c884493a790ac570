"""One progress helper: silent off a terminal, on stderr with one, and it never swallows anything."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap

import pytest

from orchard.core.progress import clock, lasting, progress, track


def test_off_a_terminal_it_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("reading", total=3, unit="bytes") as advance:
        advance()
        advance(2, note="a file")
    assert list(track(range(3), "counting")) == [0, 1, 2]
    assert list(track((i for i in "ab"), "no length", total=2)) == ["a", "b"]
    assert capfd.readouterr() == ("", "")


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(ValueError, match="mine"), progress("reading") as advance:
        advance()
        raise ValueError("mine")


def test_off_a_terminal_rich_is_not_even_imported() -> None:
    code = "import sys; from orchard.core.progress import track; list(track([1], 'x')); sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, timeout=60).returncode == 0


def on_a_terminal(code: str, columns: int = 100) -> tuple[bytes, str]:
    """Run a program whose stderr is a terminal and whose stdout is not: what each of them got."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=slave,
            timeout=60,
            env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
        )
        os.close(slave)
        shown = screen.read(65536).decode(errors="replace")
    assert done.returncode == 0, shown
    return done.stdout, shown


def test_on_a_terminal_the_bar_goes_to_stderr_only() -> None:
    out, shown = on_a_terminal("""
        from orchard.core.progress import progress, track
        with progress("reading", total=2_000_000, unit="bytes") as advance:
            advance(1_000_000, note="part one")
        print("result", list(track(["x"], "counting")))
    """)
    assert out == b"result ['x']\n"
    assert "reading" in shown and "part one" in shown and "MB" in shown and "counting" in shown


def test_notes_and_the_time_left_are_what_the_job_says_on_eighty_columns() -> None:
    _, shown = on_a_terminal(
        """
        from orchard.core.progress import progress
        with progress("training", total=1000, unit="steps") as advance:
            advance(200, note="loss 2.3412, 182,345 tokens/s, ~31 % MFU", left=733.0)
        with progress("writing [bold]x[/bold]", total=2) as advance:
            advance()
        """,
        columns=80,
    )
    assert "200/1000" in shown and "0:12:13" in shown and "loss 2.3412, 182,345 tokens/s, ~31 % MFU" in shown
    assert "[bold]x[/bold]" in shown, "a title is no markup"


@pytest.mark.parametrize(
    ("seconds", "words", "digits"),
    [
        (-1, "0 s", "0:00:00"),
        (0.123, "0.12 s", "0:00:00"),
        (42, "42 s", "0:00:42"),
        (60, "1 min", "0:01:00"),
        (725, "12 min 5 s", "0:12:05"),
        (12_030, "3 h 20 min", "3:20:30"),
        (100_000, "27 h 46 min", "27:46:40"),
        (200_000, "2 days 7 h", "55:33:20"),
    ],
)
def test_times_as_people_say_them(seconds: float, words: str, digits: str) -> None:
    assert lasting(seconds) == words and clock(seconds) == digits


def test_results_printed_beside_a_bar_stay_on_stdout() -> None:
    out, _ = on_a_terminal("""
        from orchard.core.progress import track
        for item in track(["x"], "counting"):
            print("result", item)
    """)
    assert out == b"result x\n"
