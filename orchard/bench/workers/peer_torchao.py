"""torchao's 2-bit weights: a folder of matrices goes in (`.npy`, float32), and for each of its ways to choose scales a folder of
the values that it would compute with comes out. Runs in an environment that has torchao, without Orchard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchao
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.quant_primitives import MappingType

WAYS: dict[str, dict[str, Any]] = {
    "symmetric": {"mapping_type": MappingType.SYMMETRIC},
    "asymmetric": {"mapping_type": MappingType.ASYMMETRIC},
}
try:
    from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

    WAYS["hqq-scales"] = {"intx_choose_qparams_algorithm": IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY}
except (ImportError, AttributeError):  # older versions have two ways
    pass


def task(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Ways by the name of their folder, with the squared error over the squared weights; and why others did not work."""
    assert name == "dequantise", name
    torch.set_num_threads(options["threads"])
    source, errors, failed = Path(options["folder"]), {}, {}
    paths = sorted(source.glob("*.npy"))
    squares = sum(float(_read(path).square().sum()) for path in paths)
    for way, settings in WAYS.items():
        target = source / way
        target.mkdir(exist_ok=True)
        try:
            errors[way] = sum(_write(path, target, options["group"], settings) for path in paths) / squares
        except Exception as error:  # a way that this version cannot go is said, and does not stop the others
            failed[way] = f"{type(error).__name__}: {error}"[:200]
    if not errors:
        raise RuntimeError(f"no way works: {failed}")
    return {"version": torchao.__version__, "errors": errors, "failed": failed}


def _write(path: Path, target: Path, group: int, settings: dict[str, Any]) -> float:
    weight = _read(path)
    values = _values(weight, group, settings)
    np.save(target / path.name, values.numpy())
    return float((values - weight).square().sum())


def _read(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(np.lib.format.open_memmap(path, mode="r")))


def _values(weight: torch.Tensor, group: int, settings: dict[str, Any]) -> torch.Tensor:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    holder = torch.nn.ModuleDict({"linear": linear})
    bits: Any = torch.int2  # type: ignore[attr-defined]
    quantize_(holder, IntxWeightOnlyConfig(weight_dtype=bits, granularity=PerGroup(group), **settings))
    kept: Any = holder["linear"].weight
    values: torch.Tensor = kept.dequantize().float()
    return values
