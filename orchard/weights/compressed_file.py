"""The compressed model file `.orchard`, opened: what it says of itself, checked; its tensors; the tokenizer's files inside it.

It is a safetensors file, so a model is one file that other tools can look into. The metadata `orchard.model` is a JSON object:
`format` (1), `family`, `hf_config`, `tree` (the config tree, as `to_dict` writes it), `bits` (the accounting), `made` (where it
came from). Tensors have Orchard's names with the names of packed parts: `stack.layers.0.mixer.q.codes`, `….scales`. One more,
`tokenizer.files`, is lzma-compressed: a line of JSON with names and sizes, then the files one after another.

No torch is needed to open one. The tree is checked when it is asked for (`compressed_tree`), because that takes torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import BadFile, MissingExtra, UsageError
from orchard.weights.compressed_bits import Accounting
from orchard.weights.mapped import json_object
from orchard.weights.safetensors import SafeTensorInfo, SafetensorsFile

if TYPE_CHECKING:
    import torch

ENDING = ".orchard"
FORMAT = 1
KEY = "orchard.model"
FILES = "tokenizer.files"
"""The tensor that holds the tokenizer's files."""
MOST_FILES = 32
MOST_BYTES = 64 * 1024 * 1024  # of the tokenizer's files together; those of large vocabularies reach 35 MB
MOST_TIMES = 100  # what lzma may have made smaller: tokenizers become a tenth, and only a trap becomes a thousandth
FREE = 1 << 16  # bytes to which that does not apply
DECODER_MEMORY = 40 << 20
AGAIN = "the file is damaged or incomplete; get it again"


def is_compressed(path: Path | str) -> bool:
    """Whether a path is a compressed model's, by its name."""
    return Path(path).suffix == ENDING


class CompressedFile:
    """An open file: `tensors` (without the tokenizer's), `family`, `hf_config`, `tree` (plain data), `made`, `accounting`."""

    def __init__(self, file: SafetensorsFile, size: int) -> None:
        self.path = file.path
        self._file = file
        self._unpacked: dict[str, bytes] | None = None
        told = _description(file)
        self.family, self.hf_config, self.tree, self.made = (told[n] for n in ("family", "hf_config", "tree", "made"))
        self.tensors: dict[str, SafeTensorInfo] = {n: i for n, i in file.tensors.items() if n != FILES}
        self.accounting = self._accounting(told.get("bits"), size)

    @classmethod
    def open(cls, path: Path | str) -> CompressedFile:
        file = SafetensorsFile.open(path)
        try:
            return cls(file, Path(path).stat().st_size)
        except BaseException:
            file.close()
            raise

    @property
    def licence(self) -> str | None:
        found = self.made.get("licence")
        return found if isinstance(found, str) and found else None

    def raw(self, name: str) -> np.ndarray:
        return self._file.raw(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in its own dtype."""
        return self._file.read(name)

    # The tokenizer's files ----------------------------------------------------------------------------------------

    def files(self) -> dict[str, bytes]:
        """Everything that lies beside the weights in a folder, by name."""
        if self._unpacked is None:
            packed = self._file.raw(FILES).tobytes() if FILES in self._file.tensors else b""
            self._unpacked = unpack_files(packed, self.path) if packed else {}
        return self._unpacked

    def json(self, name: str) -> dict[str, Any] | None:
        data = self.files().get(name)
        return None if data is None else json_object(data, f"{self.path}: {name}")

    def text(self, name: str) -> str | None:
        data = self.files().get(name)
        try:
            return None if data is None else data.decode("utf-8")
        except UnicodeDecodeError:
            raise BadFile(f"{self.path}: {name} is not UTF-8 text", hint=AGAIN) from None

    def tokenizer_facts(self) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]:
        """The tokenizer's config (with the template, wherever it lay), the special tokens' map, the generation config."""
        config = dict(self.json("tokenizer_config.json") or {})
        template = self.text("chat_template.jinja")
        if template is not None:
            config["chat_template"] = template
        return config, self.json("special_tokens_map.json"), self.json("generation_config.json")

    # Inside -------------------------------------------------------------------------------------------------------

    def _accounting(self, told: Any, size: int) -> Accounting:
        """What the file says of its bytes, held against what the header says."""
        found = Accounting.from_dict(told)
        if found is None:
            raise BadFile(f"{self.path}: its accounting is missing, or does not add up", hint=AGAIN)
        words = self._file.tensors[FILES].nbytes if FILES in self._file.tensors else 0
        header = size - words - sum(info.nbytes for info in self.tensors.values())
        if (found.total, found.header, found.tokenizer) != (size, header, words):
            raise BadFile(f"{self.path} has {size:,} bytes, and says that it has {found.total:,}", hint=AGAIN)
        return found

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CompressedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _description(file: SafetensorsFile) -> dict[str, Any]:
    text = file.metadata.get(KEY)
    if text is None:
        packed = "orchard" in file.metadata
        what = "a packed file of the native engine" if packed else "no compressed model of Orchard's"
        hint = "name the model that it was made from" if packed else "such a file is written by `orchard compress`"
        raise BadFile(f"{file.path} is {what}", hint=hint)
    told = json_object(text.encode("utf-8", "replace"), f"{file.path}: its description")
    if told.get("format") != FORMAT or type(told["format"]) is not int:
        version = str(told.get("format"))[:20]
        version = version if version.isprintable() else "?"
        raise BadFile(f"{file.path} has format {version}, not {FORMAT}", hint="use the Orchard that wrote it, or newer")
    for name, kind in (("family", str), ("hf_config", dict), ("tree", dict), ("made", dict)):
        if not isinstance(told.get(name), kind):
            raise BadFile(f"{file.path}: its description has no {name}", hint=AGAIN)
    info = file.tensors.get(FILES)
    if info is not None and (info.dtype != "U8" or len(info.shape) != 1):
        raise BadFile(f"{file.path}: {FILES} holds no bytes", hint=AGAIN)
    return told


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Files as one compressed piece; none at all gives nothing."""
    if not files:
        return b""
    total = sum(map(len, files.values()))
    if len(files) > MOST_FILES or total > MOST_BYTES or not all(_is_name(name) for name in files):
        raise UsageError(
            f"{len(files)} files of {total:,} bytes are no tokenizer's",
            hint=f"at most {MOST_FILES} files of {MOST_BYTES:,} bytes together, with plain names",
        )
    lzma, names = _lzma(), sorted(files)
    head = json.dumps({name: len(files[name]) for name in names}, separators=(",", ":")).encode()
    whole = head + b"\n" + b"".join(files[name] for name in names)
    packed: bytes = lzma.compress(whole, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, preset=6 | lzma.PRESET_EXTREME)
    return packed


def unpack_files(packed: bytes, path: Path) -> dict[str, bytes]:
    """The inverse, which never unpacks more than was announced, nor more than a tokenizer can be."""
    lzma, most = _lzma(), min(MOST_BYTES, MOST_TIMES * len(packed) + FREE)
    try:
        reader = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=DECODER_MEMORY)
        first = reader.decompress(packed, max_length=8192)
        line, newline, rest = first.partition(b"\n")
        sizes = json_object(line, f"{path}: the list of its tokenizer's files") if newline else {}
        wrong = len(sizes) > MOST_FILES or not all(_is_name(name) for name in sizes)
        if wrong or not sizes or not all(type(size) is int and 0 <= size <= most for size in sizes.values()):
            raise BadFile(f"{path}: the list of its tokenizer's files makes no sense", hint=AGAIN)
        total = sum(sizes.values())
        if total > most:
            raise BadFile(f"{path}: its tokenizer would have {total:,} bytes", hint=AGAIN)
        pieces, have = [rest], len(rest)
        while have <= total and not reader.eof and (have < total or not reader.needs_input):
            piece = reader.decompress(b"", max_length=max(1, min(1 << 20, total - have)))
            if not piece and not reader.eof:
                break
            pieces.append(piece)
            have += len(piece)
        if have != total or not reader.eof or reader.unused_data:
            raise BadFile(f"{path}: its tokenizer's files are not as long as they should be", hint=AGAIN)
    except (lzma.LZMAError, EOFError) as error:
        raise BadFile(f"{path}: its tokenizer's files are damaged: {error}", hint=AGAIN) from error
    found, at, whole = {}, 0, b"".join(pieces)
    for name, size in sizes.items():
        found[name] = whole[at : at + size]
        at += size
    return found


def _lzma() -> Any:
    """The module, which a Python that somebody built without the library lacks: only these files need it."""
    try:
        import lzma
    except ImportError as error:
        hint = "install liblzma's headers and build Python again, or use another one"
        raise MissingExtra("this Python was built without lzma, which compressed files need", hint=hint) from error
    return lzma


def _is_name(name: str) -> bool:
    """A plain file name: such names are also written into folders."""
    plain = all(letter.isalnum() or letter in "._-" for letter in name)
    return name.isascii() and plain and 0 < len(name) <= 100 and not name.startswith(".")
