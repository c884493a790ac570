"""Parquet files: the columns of `orchard.data.rows`, read a few rows at a time. Needs pyarrow, the extra `data`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import BadFile, MissingExtra
from orchard.data.errors import BadSample
from orchard.data.reader import Cursor, Reader
from orchard.data.rows import FIELDS, checked
from orchard.data.source import Row
from orchard.text.tokenizer import Tokenizer


class Parquet(Reader):
    """Rows of `.parquet` files. Other columns are not read."""

    suffixes = (".parquet",)

    @config
    class Config(BaseConfig):
        paths: str | Sequence[str] = REQUIRED
        """Files, folders, patterns."""
        on_bad: str = "stop"
        rename: dict[str, str] = field(default_factory=dict)
        """Columns that are called otherwise: {"content": "text"}."""
        rows: int = 256
        """Rows in memory at a time."""

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        self._arrow = _arrow()
        super().__init__(cfg.paths, cfg.on_bad)
        self.cfg = cfg

    def _open(self, path: Path, at: list[int] | None) -> Cursor:
        return _Groups(self._arrow, path, at or [0, 0], self.cfg.rename, self.cfg.rows)


class _Groups:
    """`at`: the row group, and the row in it. Going back to a place reads its row group again, and nothing before it."""

    def __init__(self, arrow: Any, path: Path, at: list[int], rename: dict[str, str], rows: int) -> None:
        self.path, self.at, self.rename, self.rows = path, list(at), rename, rows
        try:
            self.file = arrow.ParquetFile(path)
        except Exception as error:  # pyarrow has errors of its own, some of which are no OSError
            raise BadFile(f"{path}: not a Parquet file: {str(error)[:200]}", hint="the file is damaged") from error
        names = self.file.schema_arrow.names
        self.columns = [name for name in names if rename.get(name, name) in FIELDS]
        if not self.columns:
            raise BadFile(
                f"{path}: has the columns {', '.join(names[:20])} and none of {', '.join(FIELDS)}",
                hint='name the column: rename={"its name": "text"}',
            )
        starts = [0]
        for group in range(self.file.num_row_groups):
            starts.append(starts[-1] + self.file.metadata.row_group(group).num_rows)
        self.starts = starts
        self.ahead = self._rows_of_group()

    def take(self) -> Row | None:
        while self.at[0] < self.file.num_row_groups:
            data = next(self.ahead, None)
            if data is None:
                self.at = [self.at[0] + 1, 0]
                self.ahead = self._rows_of_group()
                continue
            place = f"{self.path}:{self.starts[self.at[0]] + self.at[1] + 1}"
            self.at = [self.at[0], self.at[1] + 1]
            if isinstance(data, UnicodeDecodeError):
                raise BadSample("a column holds text that is not UTF-8", reason="not-utf8", place=place)
            named = {self.rename.get(name, name): value for name, value in data.items()}
            return Row(checked(_without_nulls(named), place), place)
        return None

    def _rows_of_group(self) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
        group, skip = self.at
        if group >= self.file.num_row_groups:
            return
        try:
            for batch in self.file.iter_batches(batch_size=self.rows, row_groups=[group], columns=self.columns):
                if skip < batch.num_rows:
                    yield from _rows(batch.slice(skip))
                skip = max(skip - batch.num_rows, 0)
        except (OSError, ValueError) as error:  # pyarrow's own are among these
            raise BadFile(f"{self.path}: row group {group}: {str(error)[:200]}", hint="the file is damaged") from error

    def close(self) -> None:
        self.file.close()


def _rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # one of them, and one by one it shows which
        for row in range(batch.num_rows):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all fields; the ones a row does not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("Parquet files need pyarrow", hint='pip install "orchard[data]"') from error
    return pyarrow.parquet
