"""Answers that are one of some texts, or match a regular expression: classifying and extracting without parsing."""

import orchard

session = orchard.Session("You sort letters.")
mood = session.respond("I love this place!", choices=["positive", "negative"]).content
print(mood)
assert mood in ("positive", "negative")

date = session.respond("When did the first man walk on the moon?", regex=r"[12]\d{3}-[01]\d-[0-3]\d").content
print(date)
assert len(date) == 10 and date[4] == "-"
