"""transformers in bfloat16 on the CPU, with its own cache and its default attention. Runs in the peers' environment."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


class Subject:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        transformers.logging.set_verbosity_error()
        self.model = AutoModelForCausalLM.from_pretrained(options["path"], dtype=torch.bfloat16).eval()

    def begin(self, prompts: list[list[int]], length: int) -> Session:
        return Session(self.model, prompts)

    def about(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "system": self.model.config._attn_implementation,
        }


class Session:
    """Prompts of equal length: no padding, so no mask is needed."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        self.model, self.prompts = model, prompts
        self.cache = DynamicCache(config=model.config)

    def read(self) -> list[int]:
        return self._next(self.prompts)

    def step(self, tokens: list[int]) -> list[int]:
        return self._next([[token] for token in tokens])

    def close(self) -> None:
        del self.cache

    @torch.inference_mode()
    def _next(self, rows: list[list[int]]) -> list[int]:
        out = self.model(torch.tensor(rows), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        best: list[int] = out.logits[:, -1].argmax(-1).tolist()
        return best
