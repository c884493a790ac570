"""Ctrl-C and SIGTERM end a run after the step under way, with a checkpoint; a second one ends it at once, without."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """`with Stopping() as stopping: … if stopping.asked: …`. Outside the main thread nothing is listened to."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """The signal."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, _: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = number
