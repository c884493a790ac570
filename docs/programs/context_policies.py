"""A conversation that outgrows its context: an error by default, or a policy that you choose."""

import orchard
from orchard import fm
from orchard.session.policies import RollingWindow
from orchard.testing import ScriptedModel

long_answer = "word " * 20


def small() -> ScriptedModel:
    return ScriptedModel([long_answer], context_size=120, repeat=True)


options = fm.GenerationOptions(maximum_response_tokens=30)
strict = orchard.Session("Be kind.", model=small(), options=options)
try:
    for number in range(9):
        strict.respond(f"Question {number}")
except fm.ExceededContextWindowSizeError as error:
    print("strict:", error)

window = orchard.Session("Be kind.", model=small(), options=options, policy=RollingWindow())
for number in range(9):
    answer = window.respond(f"Question {number}")
print("window: answered 9 questions; the last one was asked without", len(answer.dropped), "older entries")
print("nothing is lost:", len(window.transcript), "entries")
