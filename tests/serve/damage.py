"""Bodies as they should be, of which some place holds anything."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st


def damaged(body: dict[str, Any], data: st.DataObject, anything: st.SearchStrategy[Any]) -> dict[str, Any]:
    """A copy in which one place, at whatever depth, may have been replaced."""
    whole: dict[str, Any] = json.loads(json.dumps(body))
    place: Any = whole
    key: Any = None
    while data.draw(st.booleans()) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list):
            break
        place = place[key]
    if key in (place if isinstance(place, dict) else range(len(place))):
        place[key] = data.draw(anything)
    return whole
