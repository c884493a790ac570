"""Stop an answer: leave the loop, or call `cancel` from another thread. The turn is not in the transcript."""

import threading

import orchard
from orchard.core.errors import Cancelled
from orchard.testing import Answer, ScriptedModel

slow = Answer("one two three four five six seven eight nine ten", delay=0.02)
# Guardrails hold back a sentence until they have read it; without them words come one by one.
session = orchard.Session(model=ScriptedModel([slow, slow, "Here I am."]), guardrails=None)

for snapshot in session.stream("Count to ten."):
    if "three" in snapshot.text:
        break
print("left after:", snapshot.text)

threading.Timer(0.05, session.cancel).start()
try:
    session.respond("Count to ten.")
except Cancelled as error:
    print("cancelled:", error)

print(session.respond("Are you there?").content, len(session.transcript))
