"""How likely a text is to be harmful, by category: one table of weights over words and classes of words.

A multinomial logistic regression in numpy. Its weights ship with the package (`weights.bin`: a line of JSON, then whole
numbers of one byte) and come from `tools/guardrails/train.py`. A file that is not whole is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.digest import sha256
from orchard.core.errors import BadFile
from orchard.session.guardrails.features import BUCKETS, features
from orchard.session.guardrails.lexicon import Lexicon, lexicon

if TYPE_CHECKING:
    import numpy as np

BENIGN = "benign"
WEIGHTS = Path(__file__).resolve().parent / "weights.bin"
FORMAT = 1


class Classifier:
    """`scores(words)`: for each category the chance that it is this rather than harmless."""

    def __init__(self, categories: tuple[str, ...], table: np.ndarray, scale: np.ndarray, lexicon: Lexicon) -> None:
        self.categories = categories
        self.lexicon = lexicon
        self._table, self._scale = table, scale

    def logits(self, words: list[str]) -> np.ndarray:
        """Log odds of each category against harmless."""
        rows = self._table[[*features(words, self.lexicon), BUCKETS]]
        scores = rows.sum(axis=0, dtype="int32") * self._scale
        odds: np.ndarray = scores[1:] - scores[0]
        return odds

    def scores(self, words: list[str]) -> dict[str, float]:
        import numpy as np

        odds = self.logits(words)
        chances = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
        return dict(zip(self.categories, chances.tolist()))


def pack(categories: list[str], weights: np.ndarray) -> bytes:
    """The bytes of a weights file. `categories` begins with harmless; the last row of `weights` is the bias."""
    import numpy as np

    largest = np.abs(weights).max(axis=0)
    largest[largest == 0] = 1
    scale = largest / 127
    body = np.rint(weights / scale).astype(np.int8).tobytes()
    head: dict[str, Any] = {"format": FORMAT, "categories": categories, "buckets": BUCKETS}
    head |= {"scale": [float(f"{value:.6g}") for value in scale], "sha256": sha256(body).hex()}
    return json.dumps(head).encode() + b"\n" + body


def read(path: Path = WEIGHTS, known: Lexicon | None = None) -> Classifier:
    """The classifier in a file; `BadFile` where it is damaged or of another make."""
    import numpy as np

    head_text, _, body = path.read_bytes().partition(b"\n")
    try:
        head = json.loads(head_text)
        categories, scale = head["categories"], np.array(head["scale"], dtype=np.float32)
        right = head["format"] == FORMAT and head["buckets"] == BUCKETS and sha256(body).hex() == head["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(
            f"{path.name} is no file of guardrail weights: {error}", hint="install the package again"
        ) from error
    if not right or len(body) != (BUCKETS + 1) * len(categories) or len(scale) != len(categories):
        raise BadFile(f"{path.name} is damaged or of another version", hint="install the package again")
    table = np.frombuffer(body, dtype=np.int8).reshape(BUCKETS + 1, len(categories))
    return Classifier(tuple(categories[1:]), table, scale, known or lexicon())
