"""Where episodes lie while another is open: in memory, or in a folder, one safetensors file each, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from orchard.core.errors import BadFile
from orchard.core.files import atomic_write, safe_join

Arrays = dict[str, np.ndarray]


class Shelf:
    """Arrays by number. `folder` None: in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._held: dict[int, Arrays] = {}
        self._sizes: dict[int, int] = {}

    def put(self, number: int, arrays: Arrays) -> None:
        if self.folder is None:
            self._held[number] = arrays
        else:
            from safetensors.numpy import save

            with atomic_write(self._path(number)) as file:
                file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
        self._sizes[number] = sum(array.nbytes for array in arrays.values())

    def take(self, number: int) -> Arrays:
        """What was put there; it stays."""
        if self.folder is None:
            return self._held[number]
        from safetensors import SafetensorError
        from safetensors.numpy import load

        path = self._path(number)
        try:
            return dict(load(path.read_bytes()))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise BadFile(f"{path} is no kept episode: {error}", hint="build the memory again") from error

    def clear(self) -> None:
        for number in list(self._sizes):
            if self.folder is not None:
                self._path(number).unlink(missing_ok=True)
        self._held, self._sizes = {}, {}

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return safe_join(self.folder, f"episode-{number}.safetensors")
