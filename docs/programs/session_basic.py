"""The same without asyncio: a session, two questions, and what they cost."""

import orchard

RULES = """You are the guide of a small museum of maps. Answer in one short sentence, in plain words, as if to a curious child.
Do not ask anything back, do not repeat the question, and do not talk about yourself. If you do not know, say so. Be friendly, be
brief, and stay with what was asked: the names of countries, of cities, of rivers and of seas, and where they are."""

with orchard.Session(RULES) as session:
    session.prewarm()  # reads the instructions before the first question comes
    print(session.respond("What is the capital of France?").content)
    answer = session.respond("And of Italy?")
    print(answer.content)
    # Of the tokens that the second turn read, most were read before and found again.
    print(f"read {answer.usage.input}, of these cached {answer.usage.cached}, wrote {answer.usage.output}")
