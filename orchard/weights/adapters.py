"""PEFT adapters in and out: a folder with `adapter_config.json` and `adapter_model.safetensors`.

What is read is LoRA: for some linear maps of a base model two small matrices A and B and a scale, by Orchard's paths of those
maps; and, for who asks for it, DoRA's magnitudes beside them (arXiv 2402.09353). Everything else that PEFT can write (whole
modules, embeddings, experts …) is refused by name: a part of an adapter that is left out makes another adapter. Nothing here
needs torch but writing. What an adapter is in memory, and how a base signs itself, is in `adapter_parts`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.errors import BadFile, ModelNotFound, UnsupportedFormat, UsageError
from orchard.core.files import disk_errors, write_text
from orchard.weights.adapter_parts import VERSION
from orchard.weights.adapter_parts import Adapter as Adapter
from orchard.weights.adapter_parts import Base as Base
from orchard.weights.adapter_parts import OtherBase as OtherBase
from orchard.weights.adapter_parts import Side as Side
from orchard.weights.adapter_parts import hf_modules as hf_modules
from orchard.weights.adapter_parts import signature as signature
from orchard.weights.adapter_parts import standard_path as standard_path
from orchard.weights.mapped import AGAIN, json_object
from orchard.weights.safetensors import SafetensorsFile, write_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DISAGREE = "its config and its weights disagree: one of them is damaged, or of another adapter"
# Fields that say how an adapter was trained, or what its tensors say too.
_HARMLESS = """auto_mapping base_model_name_or_path revision task_type inference_mode peft_version peft_type r lora_alpha
lora_dropout target_modules exclude_modules fan_in_fan_out bias use_rslora init_lora_weights layers_to_transform layers_pattern
rank_pattern alpha_pattern megatron_core loftq_config eva_config qalora_group_size runtime_config orchard_base"""
# Ways to begin that also change the base model's weights: without that changed base the tensors mean nothing.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.{1,200}?)\."
    r"(?:lora_([AB])\.weight|lora_(magnitude)_vector(?:\.weight)?|(?:base_layer\.)?bias)"
)


# Reading ----------------------------------------------------------------------------------------------------------------


def read_adapter(path: Path | str, base: Base | None = None, *, dora: bool = False) -> Adapter:
    """Read a PEFT folder. With a `base`, what does not fit it is refused before any weights are read. `dora`: the caller knows
    what to do with magnitudes.

    `ModelNotFound` where there is no such folder, `BadFile` where it is damaged, `UnsupportedFormat` names what Orchard does
    not do, `OtherBase` names both models where it was made for another one.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelNotFound(f"there is no adapter folder {path}", hint="name a folder as saved by PEFT")
    try:
        reader = _Reader(path, json_object(_file(path, CONFIG, 1 << 20).read_bytes(), str(path / CONFIG)), base, dora)
        with SafetensorsFile.open(_file(path, WEIGHTS, 16 << 30)) as file:
            return reader.read(file)
    except OSError as error:
        raise BadFile(f"the adapter {path} cannot be read: {error}", hint="check its permissions") from error


def _file(path: Path, name: str, most: int) -> Path:
    """A file of the folder that is there, and no larger than any such file."""
    file = path / name
    if not file.is_file():
        pickled = name == WEIGHTS and (path / "adapter_model.bin").is_file()
        what = "only pickled weights, and Orchard never loads pickle" if pickled else f"no {name}"
        kind = UnsupportedFormat if pickled else BadFile
        raise kind(f"the adapter {path.name} has {what}", hint="save it again with a current version of PEFT")
    if file.stat().st_size > most:
        raise BadFile(f"{file} has more than {most:,} bytes", hint="check that it is the right file")
    return file


class _Reader:
    """Holds a config against the base and the file before it reads a tensor."""

    def __init__(self, path: Path, config: dict[str, Any], base: Base | None, dora: bool) -> None:
        self.name, self.config, self.base = f"the adapter {path.name}", config, base
        self.dora = dora and config.get("use_dora") is True
        self.shapes: Mapping[str, tuple[int, ...]] = {} if base is None else base.shapes
        self.refuse_features()
        self.notes = self.check_base()

    def read(self, file: SafetensorsFile) -> Adapter:
        tensors = self.tensors(file)
        paths = self.paths({module for module, _ in tensors})
        scales = {module: self.check(file, tensors, module, ours) for module, ours in paths.items()}
        adapted = {module: ours for module, ours in paths.items() if (module, "A") in tensors}
        a, b = ({module: _floats(file, tensors[module, part]) for module in adapted} for part in "AB")
        sides = {ours: Side(a[module], b[module], scales[module]) for module, ours in adapted.items()}
        biased = {module: tensors[module, "bias"] for module in paths if (module, "bias") in tensors}
        biases = {paths[module]: _floats(file, name) for module, name in biased.items()}
        sizes = {module: tensors[module, "magnitude"] for module in paths if (module, "magnitude") in tensors}
        magnitudes = {paths[module]: _floats(file, name) for module, name in sizes.items()}
        return Adapter(sides, biases, self.config, self.notes, magnitudes)

    def refuse_features(self) -> None:
        kind, start = self.config.get("peft_type", "LORA"), self.config.get("init_lora_weights")
        if kind != "LORA":
            raise UnsupportedFormat(f"{self.name} is of kind {str(kind)[:40]!r}", hint="Orchard runs LoRA adapters")
        for name, value in self.config.items():
            if value and name not in _HARMLESS.split() and not (name == "use_dora" and self.dora):
                raise UnsupportedFormat(
                    f"{self.name} uses {name[:60]} = {str(value)[:60]}, which Orchard does not do",
                    hint="train it without, or merge it into its base with PEFT",
                )
        if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
            raise UnsupportedFormat(
                f"{self.name} was begun with init_lora_weights = {start[:40]!r}, which changes its base model",
                hint="convert it to plain LoRA when saving it (PEFT: path_initial_model_for_weight_conversion)",
            )

    def check_base(self) -> tuple[str, ...]:
        made_for, base = self.config.get("orchard_base"), self.base
        if base is None:
            return ("it was held against no base model",)
        if not isinstance(made_for, str) or not made_for.startswith(VERSION):
            return (f"it does not say which model it was made for: its shapes fit {base.name}, and no more is known",)
        if made_for != base.signature:
            named = str(self.config.get("base_model_name_or_path") or "a model without a name")[:80]
            raise OtherBase(
                f"{self.name} was made for {named} ({made_for[2:14]}), not for {base.name} ({base.signature[2:14]})",
                hint="load the model that it was made for, or train the adapter again on this one",
            )
        return ()

    def tensors(self, file: SafetensorsFile) -> dict[tuple[str, str], str]:
        """(Hugging Face's module, "A", "B", "magnitude" or "bias") → the file's name of the tensor."""
        found: dict[tuple[str, str], str] = {}
        for name in file.tensors:
            match = _TENSOR.fullmatch(name)
            if match is None or (match[3] and not self.dora):
                raise UnsupportedFormat(
                    f"{self.name} holds {name[:120]!r}, which is no side path of a linear map",
                    hint="Orchard adapts linear maps; leave embeddings and whole modules out",
                )
            key = (match[1], match[2] or match[3] or "bias")
            if key in found:
                raise BadFile(f"{self.name} holds {key[0]} twice", hint=AGAIN)
            found[key] = name
        if not any(part == "A" for _, part in found):
            raise BadFile(f"{self.name} holds no side paths", hint=AGAIN)
        return found

    def paths(self, modules: Iterable[str]) -> dict[str, str]:
        """Hugging Face's names → Orchard's paths; refused where the base has no such linear map."""
        found = {module: standard_path(module) or "" for module in sorted(modules)}
        base = self.base
        if (
            base is not None
            and base.modules is not None
            and any(f"{p}.weight" not in self.shapes for p in found.values())
        ):
            own = base.modules()
            found = {module: own.get(module, ours) for module, ours in found.items()}
        for module, ours in found.items():
            if not ours or (base is not None and len(self.shapes.get(f"{ours}.weight", ())) != 2):
                raise UnsupportedFormat(
                    f"{self.name} adapts {module}, which is no linear map{f' in {base.name}' if base else ''}",
                    hint="it is for another kind of model, or for experts, which take no adapters",
                )
        return found

    def check(self, file: SafetensorsFile, tensors: Mapping[tuple[str, str], str], module: str, ours: str) -> float:
        """Whether a module's tensors have the shapes they must have; the scale of its side path."""
        names = [tensors.get((module, part)) for part in ("A", "B", "bias")]
        a, b, bias = (None if name is None else file.tensors[name].shape for name in names)
        if (a is None) != (b is None):
            raise BadFile(f"{self.name} has only half of the side path of {module}", hint=AGAIN)
        size = tensors.get((module, "magnitude"))
        shape = None if size is None else file.tensors[size].shape
        if shape != ((b[0],) if self.dora and b else None):
            raise BadFile(f"{self.name} has magnitudes of shape {shape} for {module}", hint=DISAGREE)
        weight, own_bias = self.shapes.get(f"{ours}.weight"), self.shapes.get(f"{ours}.bias")
        fits = bias is None or self.base is None or bias == own_bias
        rank = 0
        if a is not None and b is not None:
            rank = a[0] if len(a) == len(b) == 2 and a[0] == b[1] else 0
            fits = fits and rank > 0 and (weight is None or ((b[0], a[1]) == weight and rank <= max(weight)))
        if not fits:
            shapes = [list(shape) for shape in (a, b, bias) if shape is not None]
            beside = "" if weight is None else f" beside {list(weight)}"
            raise BadFile(f"{self.name} has tensors of shapes {shapes} for {module}{beside}", hint=DISAGREE)
        if not rank:
            return 0.0
        r, alpha = self.number(module, "r", "rank_pattern"), self.number(module, "lora_alpha", "alpha_pattern")
        if r != rank or not self.targeted(module):
            problem = f"has rank {rank}, where its config says {r:g}" if r != rank else "is not in its target_modules"
            raise BadFile(f"{self.name}: {module} {problem}", hint=DISAGREE)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") is True else rank)

    def number(self, module: str, name: str, pattern: str) -> float:
        """A number of the config, which a pattern may set otherwise for some modules."""
        special = self.config.get(pattern) or {}
        if not isinstance(special, dict):
            raise BadFile(f"{self.name}: {pattern} is no table", hint=DISAGREE)
        value = next((found for key, found in special.items() if self.means(key, module)), self.config.get(name, 8))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < abs(value) < 1e9:
            raise BadFile(f"{self.name}: {name} of {module} is {str(value)[:40]}", hint=DISAGREE)
        return float(value)

    def targeted(self, module: str) -> bool:
        targets = self.config.get("target_modules")
        if targets is None or isinstance(targets, str):
            return targets in (None, "all-linear") or self.means(targets, module, whole=True)
        names = targets if isinstance(targets, list) else ()
        return any(module == name or module.endswith(f".{name}") for name in names)

    def means(self, pattern: str, module: str, *, whole: bool = False) -> bool:
        """Whether a pattern of the config means a module: the end of its name, or a regular expression."""
        if re.fullmatch(r"[\w.]+", pattern):
            return module == pattern or (not whole and module.endswith(f".{pattern}"))
        # It comes from outside: an expression that could take for ever is not tried.
        costly = (
            re.search(r"\)\s*[*+{]|\\\d|\(\?", pattern) or len(re.findall(r"[*+{]", pattern)) > 2 or len(pattern) > 500
        )
        try:
            if not costly:
                return re.fullmatch(pattern if whole else rf"(.*\.)?({pattern})", module) is not None
        except (re.error, RecursionError, OverflowError):
            pass
        raise UnsupportedFormat(f"{self.name} names modules by {pattern[:60]!r}", hint="list them by name instead")


def _floats(file: SafetensorsFile, name: str) -> np.ndarray:
    info, raw = file.tensors[name], file.raw(name)
    kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}
    if info.dtype not in kinds:
        problem = f"{file.path}: tensor {name[:80]!r} has dtype {info.dtype[:20]!r}"
        raise UnsupportedFormat(problem, hint="save it as float32 or bfloat16")
    stored = raw.view(kinds[info.dtype])
    with np.errstate(over="ignore"):  # what is too large for float32 is found below
        wide = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32) if info.dtype == "BF16" else stored
        values = wide.astype(np.float32)
    if not np.isfinite(values).all():
        raise BadFile(f"{file.path}: tensor {name[:80]!r} holds a number that is none", hint=AGAIN)
    return values.reshape(info.shape)


# Writing ----------------------------------------------------------------------------------------------------------------


def write_adapter(
    path: Path | str,
    sides: Mapping[str, Side],
    base: Base,
    *,
    base_name: str = "",
    rslora: bool = False,
    dtype: str = "float32",
    more: Mapping[str, Any] | None = None,
    biases: Mapping[str, np.ndarray] | None = None,
    magnitudes: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a folder that PEFT and Orchard read, whole or not at all; it must not be there yet.

    `base` is the model that the adapter was made for, `base_name` where others find it, `more` further fields of the config
    (`task_type`, `lora_dropout`); `biases` and `magnitudes` as in `Adapter`.
    """
    import torch

    path = Path(path).absolute()
    if not sides or path.exists():
        problem = f"{path} is there already" if sides else "an adapter without side paths"
        raise UsageError(problem, hint="choose another name, or remove it first" if sides else "train one first")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"adapters are not written as {dtype!r}", hint="use float32, bfloat16 or float16")
    own = {ours: module for module, ours in (base.modules() if base.modules else {}).items()}
    name_of = {ours: own.get(ours) or _standard_name(ours) for ours in (*sides, *(biases or ()))}
    named = {name_of[ours]: side for ours, side in sides.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name or base.name,
        "inference_mode": True,
        "bias": "all" if biases else "none",
        "use_rslora": rslora,
        **({"use_dora": True} if magnitudes else {}),
        **_numbers(named, rslora),
        **(more or {}),
        "orchard_base": base.signature,
    }
    tensors = {
        f"base_model.model.{module}.lora_{part}.weight": torch.tensor(values).to(getattr(torch, dtype))
        for module, side in named.items()
        for part, values in (("A", side.a), ("B", side.b))
    }
    for ours, size in (magnitudes or {}).items():  # in float32: they are few, and each scales a whole row
        tensors[f"base_model.model.{name_of[ours]}.lora_magnitude_vector"] = torch.tensor(size)
    for ours, bias in (biases or {}).items():
        tensors[f"base_model.model.{name_of[ours]}.base_layer.bias"] = torch.tensor(bias)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
        try:
            write_safetensors(temporary / WEIGHTS, tensors, {"format": "pt"})
            write_text(temporary / CONFIG, json.dumps(config, indent=2) + "\n")
            temporary.chmod(0o755)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _numbers(sides: Mapping[str, Side], rslora: bool) -> dict[str, Any]:
    """Ranks, alphas and names as PEFT's config has them: the most common of each, and what differs by name."""
    ranks = {module: len(side.a) for module, side in sides.items()}
    alphas = {module: side.scale * ranks[module] ** (0.5 if rslora else 1) for module, side in sides.items()}
    r, alpha = (Counter(values).most_common(1)[0][0] for values in (ranks.values(), alphas.values()))
    return {
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != r},
        "alpha_pattern": {module: each for module, each in alphas.items() if each != alpha},
        "target_modules": sorted(sides),
    }


def _standard_name(ours: str) -> str:
    name = "lm_head" if ours == "head" else ours.replace("stack", "model").replace("mixer", "self_attn") + "_proj"
    if standard_path(name) != ours:
        raise UsageError(f"PEFT has no name for {ours}", hint="give the family's names: Base.modules")
    return name
