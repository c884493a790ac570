"""Profiles switch instructions, tools, options and more inside one session; a function picks one before every turn."""

import orchard
from orchard import fm
from orchard.session.profiles import Moment, Profile
from orchard.testing import ScriptedModel

planner = Profile("planner", instructions="Make a plan.", options=fm.GenerationOptions(temperature=0.2))
writer = Profile("writer", instructions=lambda moment: f"Write in {moment.properties['language']}.")


def pick(moment: Moment) -> Profile:
    return planner if moment.turns == 0 else writer


model = ScriptedModel(["1. Think. 2. Write.", "Es war einmal ..."])
session = orchard.Session(model=model, profile=pick, properties={"language": "German"})
for prompt in ("A story about a fox.", "Now write it."):
    answer = session.respond(prompt)
    print(session.active_profile.name, "|", model.turns[-1].messages[0].content, "|", answer.content)
