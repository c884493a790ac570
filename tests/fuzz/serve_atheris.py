"""Fuzz the reading of bodies and schemas with atheris, which sees the code that was reached and steers by it.

    python -m venv FOLDER && FOLDER/bin/pip install atheris
    export PYTHONPATH=.venv/lib/python3.11/site-packages
    FOLDER/bin/python -m tests.fuzz.serve_atheris --target bodies -- -max_total_time=600

Targets: `raw` (the bytes are a body), `bodies` (the bytes choose what is changed in a good body), `schemas` (the bytes choose a
schema and what is changed in it). Arguments after `--` are libFuzzer's. Anything but an answer or a refusal with a code stops the
run, and the input is kept in a file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

INSTRUMENTED = ["orchard.serve", "orchard.generate.json_schema", "orchard.generate.constraint", "orchard.session.turn"]


class FromBytes(random.Random):
    """A generator whose numbers are the bytes it was given, and zero after them: whoever changes a byte changes one choice."""

    def __new__(cls, data: bytes) -> FromBytes:
        return super().__new__(cls)

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, k: int) -> int:
        size = -(-k // 8)
        taken = self._data[self._at : self._at + size].ljust(size, b"\0")
        self._at += size
        return int.from_bytes(taken, "big") >> (8 * size - k)

    def random(self) -> float:
        return self.getrandbits(16) / 65536

    def randbytes(self, n: int) -> bytes:
        return bytes(self.getrandbits(8) for _ in range(n))

    def _randbelow(self, n: int) -> int:
        return self.getrandbits(max(8, n.bit_length())) % n if n > 0 else 0


def target(name: str, app: Any) -> Callable[[bytes], None]:
    from tests.fuzz.serve_app import checked
    from tests.fuzz.serve_bodies import CHAT, PATHS, changed, make_case
    from tests.soak import hostile

    def raw(data: bytes) -> None:
        if data:
            checked(app.post(PATHS[data[0] % len(PATHS)], data[1:]))

    def bodies(data: bytes) -> None:
        path, body = make_case(FromBytes(data))
        checked(app.post(path, body))

    def schemas(data: bytes) -> None:
        draw = FromBytes(data)
        schema = draw.choice(list(hostile.SCHEMAS.values()))(draw)
        for _ in range(draw.choice([0, 1, 2, 4])):
            schema = changed(schema, draw)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        said = [{"role": "user", "content": "x"}]
        body = {"model": hostile.MODEL, "messages": said, "max_tokens": 4, "response_format": form}
        checked(app.post(CHAT, json.dumps(body).encode()))

    return {"raw": raw, "bodies": bodies, "schemas": schemas}[name]


def main() -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not here: the first lines of this file say how to get it")
    own, theirs = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", choices=["raw", "bodies", "schemas"], default="bodies")
    options = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        with atheris.instrument_imports(
            include=INSTRUMENTED
        ):  # what is imported late, by the first requests, is watched too
            from tests.fuzz.serve_app import App
            from tests.fuzz.serve_bodies import GOOD, PATHS

            app = App(Path(folder))
            for path, body in GOOD:
                app.post(path, json.dumps(body).encode())
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, (path, body) in enumerate(GOOD):
            (corpus / f"{number}").write_bytes(bytes([PATHS.index(path)]) + json.dumps(body).encode())
        few = [str(corpus)] if options.target == "raw" else ["-max_len=256", "-len_control=0"]
        atheris.Setup([sys.argv[0], *theirs, *few], target(options.target, app))
        atheris.Fuzz()


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    main()
