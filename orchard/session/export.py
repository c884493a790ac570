"""`export`: a model in another format, with adapters merged into it or an adapter alone, and proof that it is the same model.

facts = export("smollm2", "mine.gguf", format="gguf", type="q8_0", adapters=["my-adapter"], merge=True)

Everything is written under a temporary name beside the target, read back in its own format and held against the source (see
`parity`); only then does it get its name. Whatever goes wrong before, an interruption too, leaves nothing. A whole model is in
memory once, in float32: the source is dropped before the target is read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import UsageError
from orchard.session.export_place import Placed, check_target, placed, size_of
from orchard.session.parity import Numbers, Parity, compare_numbers, prompts_of, samples_of, scores_of
from orchard.session.parity_texts import CONVERSATIONS
from orchard.session.parity_words import ExportDrift, Words, compare_words, words_of
from orchard.weights.compressed_file import is_compressed
from orchard.weights.library import Library

if TYPE_CHECKING:
    from orchard.models.language.decoder import Decoder
    from orchard.session.build import Built
    from orchard.session.model import Model
    from orchard.weights.adapters import Adapter

FORMATS = ("hf", "gguf", "orchard", "peft")
STORED = "stored"
"""The type of a compressed file: every weight as its source keeps it."""
FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was written, and what the comparison with its source found."""

    path: Path
    source: Path
    format: str
    type: str
    bytes: int
    adapters: tuple[str, ...]
    notes: tuple[str, ...]
    parity: Parity
    texts: int
    """Texts whose tokens were compared; none for an adapter, which has no tokenizer."""
    conversations: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        facts = {**self.__dict__, "path": str(self.path), "source": str(self.source), "parity": self.parity.to_dict()}
        return facts | {"adapters": list(self.adapters), "notes": list(self.notes)}


@dataclass(frozen=True, eq=False)
class _Asked:
    """What the source answered, and what to ask the target."""

    prompts: list[list[int]]
    numbers: Numbers
    words: Words | None
    config: Decoder.Config
    notes: tuple[str, ...]


def export(
    model: str | Path,
    to: str | Path,
    *,
    format: str,
    type: str | None = None,
    adapters: Sequence[str | Path] = (),
    merge: bool = False,
    unmerge: bool = False,
    force: bool = False,
    tolerance: float | None = None,
    say: Say | None = None,
) -> Exported:
    """Write a model of the library, a GGUF or compressed file or a folder as `format`: "hf" (a Hugging Face folder), "gguf",
    "orchard" (one compressed file, every weight code for code as its source keeps it), or "peft" (one of `adapters` alone, signed
    with the model it is for). `type` is of the weights; without it a folder keeps its own, a GGUF file gets f16. `merge` adds
    adapters, and the side paths that a compressed model has of its own, to the weights; `unmerge` takes adapters out of a model
    into which they were merged.

    `ExportDrift` where what was written is not what was meant; `tolerance` allows scores to be further off than the type's own
    limit. `force` replaces what is at `to`, once the new one has passed.
    """
    began = time.perf_counter()
    path, target = Library().resolve(str(model)), Path(to).absolute()
    _check(format, type, adapters, merge, unmerge, tolerance, has_sides=is_compressed(path))
    check_target(target, format, force, [path, *map(Path, adapters)])
    kind = type or _own_type(path, format)
    tell = say or (lambda line: None)
    with placed(target, force) as place:
        if format == "peft":
            asked = _write_adapter(str(model), path, Path(adapters[0]), place, kind, tell)
        elif format == "orchard":
            asked = _write_stored(str(model), path, place, tell)
        else:
            asked = _write_model(str(model), path, adapters, merge, unmerge, place, kind, tell)
        gc.collect()  # what holds the source in circles; the target needs its room
        tell("reading it back and comparing")
        parity = _gate(path, format, place, kind, asked, tolerance)
        size = size_of(place.path)
        place.keep()
    names = tuple(Path(adapter).resolve().name for adapter in adapters)
    counted = (len(asked.words.decoded), len(CONVERSATIONS)) if asked.words is not None else (0, 0)
    took = time.perf_counter() - began
    return Exported(target, path, format, kind, size, names, asked.notes, parity, *counted, took)


def _check(
    format: str,
    type: str | None,
    adapters: Sequence[Any],
    merge: bool,
    unmerge: bool,
    tolerance: float | None,
    *,
    has_sides: bool = False,
) -> None:
    """Refuse what makes no sense before anything is read. `has_sides`: the model may have side paths of its own to merge."""
    if format not in FORMATS:
        raise UsageError(f"no format called {format!r}", hint="one of " + ", ".join(FORMATS))
    if format == "orchard" and (type is not None or adapters or merge or unmerge):
        problem = f"cannot write a compressed file as {type!r}" if type else "packed weights take no adapters"
        raise UsageError(problem, hint="it keeps every weight as its source has it; `orchard compress` packs others")
    types = BITS if format == "gguf" else FLOATS
    if type is not None and type not in types:
        raise UsageError(f"cannot write {format} as {type!r}", hint="one of " + ", ".join(types))
    if merge and unmerge:
        raise UsageError("to merge and to unmerge at once", hint="give --merge or --unmerge")
    merge = merge or unmerge
    if format == "peft" and (merge or len(adapters) != 1):
        problem = "an adapter that is merged is none any more" if merge else f"{len(adapters)} adapters for one folder"
        raise UsageError(problem, hint="--format peft takes one --adapter and no --merge")
    if format != "peft" and bool(adapters) != merge and not (merge and has_sides and not unmerge):
        problem = "adapters are given, but not to be merged" if adapters else "there is nothing to merge"
        raise UsageError(
            problem, hint="give --adapter PATH with --merge or --unmerge, or --format peft for an adapter alone"
        )
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise UsageError(f"a tolerance of {tolerance}", hint="use a number from 0")


def _own_type(path: Path, format: str) -> str:
    """What is written where nobody says: what the source has, as far as the format can hold it."""
    if format != "hf":
        return {"gguf": "f16", "orchard": STORED}.get(format, "f32")
    from orchard.weights.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        own = checkpoint.hf_config.get("dtype") or checkpoint.hf_config.get("torch_dtype")
    return next((short for short, name in FLOATS.items() if name == own), "f32")


# Writing ----------------------------------------------------------------------------------------------------------------


def _write_model(
    name: str,
    path: Path,
    adapters: Sequence[str | Path],
    merge: bool,
    unmerge: bool,
    place: Placed,
    kind: str,
    tell: Say,
) -> _Asked:
    from orchard.session.build import Built
    from orchard.session.export_tree import refuse_unsayable
    from orchard.session.save import save_built

    model, built = _loaded(name, path, tell, plain=True)
    own = refuse_unsayable(built.decoder.config, place.path.name, merge=merge, unmerge=unmerge)
    read = [_read(model, Path(adapter)) for adapter in adapters]
    if merge and not read and not own:
        raise UsageError("there is nothing to merge", hint="give --adapter PATH, or leave --merge out")
    beside = _without(built, read) if unmerge else _with_adapters(built, read)
    if read or own:
        from orchard.transforms.lora import merged

        what = f"{len(read)} adapter{'s' if len(read) > 1 else ''}" if read else ""
        what += (" and " if read else "") + f"{own} side paths" if own else ""
        tell(f"{'taking out' if unmerge else 'merging'} {what}")
        made = _unmerged(built, read) if unmerge else merged(beside.decoder)
        built = Built(made, built.family, built.hf_config)
    prompts = prompts_of(model.tokenizer, built.decoder.config.vocab, built.decoder.config.context)
    numbers = Numbers(scores_of(beside.decoder, prompts), samples_of(built.decoder))
    values = sum(parameter.numel() for parameter in built.decoder.parameters())
    place.need(int(values * BITS[kind] / 8))
    tell(f"writing {place.path.name}")
    as_type = kind if place.path.suffix == ".gguf" else FLOATS[kind]
    save_built(built, model.tokenizer, path, place.path, as_type)
    notes = tuple(note for adapter in read for note in adapter.notes)
    return _Asked(prompts, numbers, words_of(model.tokenizer), built.decoder.config, notes)


def _write_adapter(name: str, path: Path, folder: Path, place: Placed, kind: str, tell: Say) -> _Asked:
    from orchard.weights.adapters import write_adapter

    model, built = _loaded(name, path, tell)
    adapter = _read(model, folder)
    prompts = prompts_of(model.tokenizer, built.decoder.config.vocab, built.decoder.config.context)
    beside = _with_adapters(built, [adapter]).decoder
    config = adapter.config
    tell(f"writing {place.path.name}")
    write_adapter(
        place.path,
        adapter.sides,
        model.adapters.base,
        base_name=str(config.get("base_model_name_or_path") or name),
        rslora=config.get("use_rslora") is True,
        dtype=FLOATS[kind],
        more={key: config[key] for key in ("task_type", "lora_dropout", "revision") if config.get(key) is not None},
        biases=adapter.biases,
        magnitudes=adapter.magnitudes,
    )
    numbers = Numbers(scores_of(beside, prompts), samples_of(beside))
    return _Asked(prompts, numbers, None, beside.config, adapter.notes)


def _write_stored(name: str, path: Path, place: Placed, tell: Say) -> _Asked:
    """One compressed file of what is there, code for code."""
    from orchard.session.build import build_stored
    from orchard.session.save import companions, save_built
    from orchard.weights.compressed import accounting

    tell(f"reading {path.name}")
    tokenizer, built = build_stored(path)
    prompts = prompts_of(tokenizer, built.decoder.config.vocab, built.decoder.config.context)
    numbers = Numbers(scores_of(built.decoder, prompts), samples_of(built.decoder))
    words = companions(tokenizer, path)
    counted = accounting(built.decoder, family=built.family, hf_config=built.hf_config, tokenizer_files=words)
    place.need(counted.total)
    tell(f"writing {place.path.name}")
    save_built(built, tokenizer, path, place.path, None)
    notes = () if not counted.sides else ("side paths are kept in half precision",)
    return _Asked(prompts, numbers, words_of(tokenizer), built.decoder.config, notes)


def _loaded(name: str, path: Path, tell: Say, *, plain: bool = False) -> tuple[Model, Built]:
    """`plain`: with weights that can be merged into, also of a compressed file."""
    from orchard.session.build import build
    from orchard.session.model import Model
    from orchard.weights.stored import as_dense

    tell(f"reading {path.name}")
    tokenizer, built = build(path, as_dense if plain and is_compressed(path) else None)
    return Model(built, tokenizer, name=name, source=path), built


def _read(model: Model, folder: Path) -> Adapter:
    from orchard.weights.adapters import read_adapter

    return read_adapter(folder, model.adapters.base, dora=True)


def _with_adapters(built: Built, adapters: Sequence[Adapter]) -> Built:
    """The model with adapters beside its weights: what the merged one is held against."""
    if not adapters:
        return built
    from orchard.session.adapters import together
    from orchard.session.build import Built
    from orchard.transforms.lora import with_sides

    lengths = {path: size for adapter in adapters for path, size in adapter.magnitudes.items()}
    return Built(with_sides(built.decoder, *together(adapters), lengths), built.family, built.hf_config)


def _without(built: Built, adapters: Sequence[Adapter]) -> Built:
    """A merged model with its adapters beside the weights once more, turned round: what the unmerged one is held against."""
    from orchard.session.adapters import together
    from orchard.session.build import Built
    from orchard.transforms.lora import with_sides

    for adapter in adapters:
        if adapter.biases:
            raise UsageError(
                "an adapter that put other biases in place cannot be taken out", hint="load the base itself"
            )
    turned = {path: [(a, b, -scale) for a, b, scale in many] for path, many in together(adapters)[0].items()}
    return Built(with_sides(built.decoder, turned), built.family, built.hf_config)


def _unmerged(built: Built, adapters: Sequence[Adapter]) -> Decoder:
    from orchard.transforms.lora import unmerged

    decoder = built.decoder
    for adapter in adapters:
        sides = {path: (side.a, side.b, side.scale) for path, side in adapter.sides.items()}
        decoder = unmerged(decoder, sides, adapter.magnitudes)
    return decoder


# The gate ---------------------------------------------------------------------------------------------------------------


def _gate(path: Path, format: str, place: Placed, kind: str, asked: _Asked, tolerance: float | None) -> Parity:
    """Read what was written as any reader would, and ask it what its source was asked."""
    from orchard.core.config_text import diff
    from orchard.session.build import build
    from orchard.weights.same_config import config_change

    if format == "peft":
        model, built = _loaded(place.path.name, path, lambda line: None)
        decoder = _with_adapters(built, [_read(model, place.path)]).decoder
    else:
        tokenizer, built = build(place.path, None)
        decoder = built.decoder
        assert asked.words is not None
        compare_words(asked.words, words_of(tokenizer))
    if format == "orchard":  # which can say everything
        change = next(iter(diff(asked.config.complete(), decoder.config.complete())), None)
        kind = "f16" if asked.notes else "f32"  # side paths are rounded, nothing else is
    else:
        change = config_change(asked.config, decoder.config)
    if change is not None:
        raise ExportDrift("config", change.path, change.old, change.new)
    found = Numbers(scores_of(decoder, asked.prompts), samples_of(decoder))
    return compare_numbers(asked.numbers, found, asked.prompts, kind, tolerance)
