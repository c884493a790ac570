"""A server in a process of its own, for tests that attack it: `python server_program.py '{"limits": {…}, "words": 40, …}'`.

Its model `scripted` says so many words, one each `delay` seconds. It prints its address as JSON when it is ready.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(given: str) -> int:
    from orchard.serve.app import create_app
    from orchard.serve.server import Listening, run_app
    from orchard.serve.settings import Limits, ModelSpec, Settings
    from orchard.testing import ScriptedModel

    asked = json.loads(given)
    settings = Settings(
        (ModelSpec("scripted", "scripted"),),
        port=0,
        keys=tuple(asked.get("keys", ())),
        tls_cert=asked.get("tls_cert"),
        tls_key=asked.get("tls_key"),
        limits=Limits(**asked.get("limits", {})),
    )
    app = create_app(settings)
    script = ScriptedModel(["word " * asked.get("words", 2)], repeat=True, delay=asked.get("delay", 0.0))
    app.state.service.hub.add("scripted", script)

    def ready(listening: Listening) -> None:
        print(json.dumps({"url": listening.url, "port": listening.port, "pid": os.getpid()}), flush=True)

    return run_app(app, settings, drain=app.state.service.gate.drain, ready=ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
