"""Stream a typed answer: fields fill in, one after the other, in the order in which they are declared."""

import orchard
from orchard import fm


@fm.generable
class Story:
    title: str
    words: list[str] = fm.guide("Three words from it", count=3, element=fm.GenerationGuide.regex("[a-z]{3,12}"))


session = orchard.Session()
for snapshot in session.stream("Invent a story about a fox.", generating=Story):
    print(snapshot.content)
