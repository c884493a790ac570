"""From a Hugging Face folder to an encoder that runs: held against its config, built without memory, filled tensor by tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orchard.core.errors import BadFile, UnknownArchitecture
from orchard.core.progress import progress
from orchard.models.language.encoder import Encoder
from orchard.models.zoo import families
from orchard.models.zoo.bert import UNREAD, bert, hf_names
from orchard.models.zoo.fields import count, shown
from orchard.nn.tensors import fill, tensor_names, tensor_shapes
from orchard.weights.checkpoint import DISAGREE, INCOMPLETE, check_tensor, refuse_packing
from orchard.weights.folder import HFFolder
from orchard.weights.sentence import ENCODERS, MakesNoVectors, Sentence, is_encoder, sentence_of

_LAYER = re.compile(r"(?:bert\.)?encoder\.layer\.(\d{1,9})\.")


@dataclass
class EncoderFolder:
    """An open folder with an encoder in it. Close it, or use it as a context manager."""

    folder: HFFolder
    sentence: Sentence

    @property
    def path(self) -> Path:
        return self.folder.path

    def config(self) -> Encoder.Config:
        """The model as a config tree, without weights; refused when the tensors belie its number of layers."""
        claimed = count(self.folder.config, "num_hidden_layers", 12)
        found = {match[1] for match in map(_LAYER.match, self.folder.tensors) if match is not None}
        if claimed != len(found):
            raise BadFile(
                f"num_hidden_layers is {claimed:,}, but {self.path.name} holds tensors of {len(found):,} layers",
                hint=DISAGREE,
            )
        return bert(self.folder.config).set("pooling.how", self.sentence.pooling)

    def names(self, tree: Encoder.Config) -> dict[str, str]:
        """Each tensor of a completed tree and its name in the folder. A tensor that is missing, has another shape or kind, or
        belongs to nothing, is refused before anything is read."""
        tensors, found = self.folder.tensors, {}
        for ours, shape in tensor_shapes(tree).items():
            names = hf_names(ours)
            name = next((name for name in names if name in tensors), None)
            if name is None:
                raise BadFile(f"{self.path.name} has no tensor {names[0]!r}", hint=INCOMPLETE)
            check_tensor(self.path, tensors, name, shape)
            found[ours] = name
        used = set(found.values())
        left = [name for name in tensors if name not in used and not UNREAD.fullmatch(name)]
        if left:
            shortly = ", ".join(map(shown, left[:3])) + (" …" if len(left) > 3 else "")
            raise BadFile(
                f"{len(left)} tensors of {self.path.name} belong to no part of a bert model: {shortly}", hint=DISAGREE
            )
        return found

    def close(self) -> None:
        self.folder.close()

    def __enter__(self) -> EncoderFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_encoder(path: Path | str, name: str = "") -> EncoderFolder:
    """Open the folder of an embedding model; reads headers and small files only. `name` is what messages call it."""
    path = Path(path)
    if path.is_file():
        raise _no_vectors(name or path.name)
    folder = HFFolder.open(path)
    try:
        kind = folder.config.get("model_type")
        if not is_encoder(folder.config):
            if kind in families():
                raise _no_vectors(name or path.name)
            raise UnknownArchitecture(
                f"unknown architecture {shown(kind)}", hint=f"known families of encoders: {', '.join(sorted(ENCODERS))}"
            )
        refuse_packing(folder.config)
        return EncoderFolder(folder, sentence_of(folder))
    except BaseException:
        folder.close()
        raise


def load_encoder(
    opened: EncoderFolder, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Encoder:
    """Build the folder's model and read its weights."""
    tree = opened.config().complete()
    names = opened.names(tree)
    with torch.device("meta"):
        model: Encoder = tree.build()
    with progress(f"reading {opened.path.name}", total=len(names)) as advance:
        for ours, (module, attribute) in tensor_names(model).items():
            tensor: Tensor = opened.folder.read(names[ours])
            fill(module, attribute, ours, tensor, dtype, device)
            advance()
    return model.eval().requires_grad_(False)


def _no_vectors(name: str) -> MakesNoVectors:
    return MakesNoVectors(
        f"{name} writes text; it does not turn texts into vectors",
        hint="use an embedding model: `orchard pull minilm` gets one",
    )
