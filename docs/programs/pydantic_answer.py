"""A Pydantic model as the form of an answer: its bounds hold while the text is written, not after."""

from pydantic import BaseModel, Field

import orchard


class Ticket(BaseModel):
    """A request for help."""

    title: str = Field(description="A few words", max_length=40)
    urgency: int = Field(ge=1, le=5)
    tags: list[str] = Field(min_length=1, max_length=3)


session = orchard.Session("You sort letters to a help desk.")
ticket = session.respond("My printer is on fire!", generating=Ticket).content
print(ticket.model_dump_json())
assert isinstance(ticket, Ticket) and 1 <= ticket.urgency <= 5
