"""A text judged piece by piece as it grows, and how much of it has been found good.

Each piece is judged by itself and together with the end of what came before, so that nothing hides on a border. The cost
is linear: every character is in at most two judgements.
"""

from __future__ import annotations

from orchard.session.guardrails.json_text import BREAK, JsonStrings
from orchard.session.guardrails.judge import Finding, Judge
from orchard.session.guardrails.segments import Segmenter
from orchard.session.guardrails.verdict import Stage, Violation, explain

OVERLAP = 96
"""Characters before a piece that it is judged together with."""
SURE = 0.8
"""Two pieces that are harmless one by one must look this bad together: words meet by chance on a border."""


class Watch:
    """`push` text; `violations` are what has been found, and `clear` is how many characters of it have been judged."""

    def __init__(self, judge: Judge, stage: Stage, structured: bool, *, json: bool = False, context: str = "") -> None:
        """`structured`: which part of the policy applies; `json`: that the text is JSON."""
        self.violations: list[Violation] = []
        self.clear = 0
        self._judge, self._stage, self._structured = judge, stage, structured
        self._strings = JsonStrings() if json else None
        self._segmenter = Segmenter()
        self._before = context[-OVERLAP:]
        self._piece: list[str] = []
        self._starts: list[int] = []
        self._place = 0

    def push(self, text: str) -> list[Violation]:
        """What the new text brought to light."""
        found: list[Violation] = []
        if self._strings is not None:
            for character, at in self._strings.push(text):
                found += self._take(character, at)
            self._place = self._strings.place
            held = self._strings.held
        else:
            for offset, character in enumerate(text):
                found += self._take(character, self._place + offset)
            self._place, held = self._place + len(text), None
        waiting = [self._starts[0]] if self._starts else []
        self.clear = min([*waiting, *([held] if held is not None else []), self._place])
        self.violations += found
        return found

    def finish(self) -> list[Violation]:
        """Judge what is left."""
        found = self._close(self._place)
        self.clear = self._place
        self.violations += found
        return found

    def _take(self, character: str, at: int) -> list[Violation]:
        if character == BREAK:
            return self._close(at)
        self._piece.append(character)
        self._starts.append(at)
        return self._close(at + 1) if self._segmenter.push(character) else []

    def _close(self, end: int) -> list[Violation]:
        """The piece is complete: judge it."""
        self._segmenter.cut()
        piece, start = "".join(self._piece), self._starts[0] if self._starts else end
        self._piece, self._starts = [], []
        if not piece.strip():
            self._before += piece
            return []
        found = self._judge.findings(piece, self._stage)
        if not found and self._before.strip():
            together = self._judge.findings(f"{self._before} {piece}", self._stage)
            found = [finding for finding in together if finding.score >= SURE]
        # What was found once is not found again with whatever follows it.
        self._before = "" if found else f"{self._before} {piece}"[-OVERLAP:]
        return [violation for finding in found if (violation := self._violation(finding, (start, end))) is not None]

    def _violation(self, finding: Finding, span: tuple[int, int]) -> Violation | None:
        action = self._judge.policy.action(finding.category, finding.score, self._structured)
        if action == "allow":
            return None
        return Violation(
            category=finding.category,
            score=finding.score,
            span=span,
            rule=finding.rule,
            stage=self._stage,
            explanation=explain(finding.category, self._stage),
            action=action,
        )
