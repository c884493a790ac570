"""Test an application without a model: answers come from a script, and what was asked is there to look at."""

from dataclasses import dataclass

import orchard
from orchard import fm
from orchard.testing import ScriptedModel


@dataclass
class Person:
    name: str
    age: int


def greet(session: orchard.Session, text: str) -> str:
    """The application: what is tested."""
    try:
        person = session.respond(text, generating=Person).content
    except fm.RateLimitedError:
        return "Please wait."
    return f"Hello {person.name}, {person.age}!"


model = ScriptedModel([{"name": "Ada", "age": 36}, fm.RateLimitedError()])
session = orchard.Session("Find the person.", model=model)
assert greet(session, "I am Ada and I am 36.") == "Hello Ada, 36!"
assert greet(session, "I am Ada and I am 36.") == "Please wait."
assert model.turns[0].messages[0].content == "Find the person." and len(session.transcript) == 3
print("both tests passed")
