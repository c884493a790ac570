"""Where a model computes and in what numbers, as `load` is told; torch is asked only where nothing else can tell."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from orchard.core.errors import UsageError

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")


def may_have_cuda() -> bool:
    """Whether torch is worth asking for a CUDA device. Asking costs its whole import, so first the drivers' own signs are
    looked for; where there is one, and on systems that show none, torch has the word."""
    if sys.platform == "darwin" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if not sys.platform.startswith("linux"):
        return True
    return any(map(os.path.exists, _SIGNS))


def device_of(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise UsageError(f"there is no device {name!r} here", hint="`orchard doctor` shows what there is") from error
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype
