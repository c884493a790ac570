"""Save a session with what the model has read, and go on in another process: the same seed gives the same words."""

import tempfile
from pathlib import Path

import orchard
from orchard import fm

options = fm.GenerationOptions(temperature=0.8, maximum_response_tokens=24, seed=5)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "talk.json"
    session = orchard.Session("You tell very short stories.", options=options)
    session.respond("Begin a story about a fox.")
    session.save(path)
    here = session.respond("Go on.")

    resumed = orchard.Session.resume(path, options=options)
    there = resumed.respond("Go on.")
    print(there.content)
    print("cached:", there.usage.cached, "of", there.usage.input)
    assert here.content == there.content
