"""Plain Python types as answers: dataclasses, enums, literals, dates, lists, and `X | None`."""

from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Literal

import orchard
from orchard import fm


class Kind(Enum):
    ROAD = "road"
    TRAIL = "trail"


@dataclass
class Race:
    name: str
    kind: Kind
    day: date
    kilometres: Literal[5, 10, 21, 42]
    sponsor: str | None


session = orchard.Session()
options = fm.GenerationOptions(maximum_response_tokens=120)
race = session.respond("Invent a race in the mountains.", generating=Race, options=options).content
print(race)
assert isinstance(race, Race) and isinstance(race.kind, Kind) and isinstance(race.day, date)
