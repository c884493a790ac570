"""llama.cpp through llama-cpp-python: one model, a context of its own for each session.

`via` "batch" calls llama.cpp's own functions with batches built here, the shortest way from Python; "eval" is the method that
users of llama-cpp-python call. Runs in the peers' environment, without Orchard.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as native

BATCH = 512
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@native.llama_log_callback
def _silence(level: int, text: bytes, data: Any) -> None:
    return None


class Subject:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        native.llama_log_set(_silence, ctypes.c_void_p(0))
        native.llama_backend_init()
        self.whole: Any = None  # of "eval"
        self.made: tuple[int, int, Any] | None = None  # of "batch"
        if options.get("via") == "eval":
            return
        self.model = native.llama_model_load_from_file(options["path"].encode(), native.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp cannot load the model")
        self.vocab = native.llama_vocab_n_tokens(native.llama_model_get_vocab(self.model))

    def begin(self, prompts: list[list[int]], length: int) -> Any:
        if self.options.get("via") == "eval":
            return EvalSession(self, prompts, length)
        return BatchSession(self, prompts, length)

    def context(self, sequences: int, length: int) -> Any:
        if self.made is not None and self.made[:2] == (sequences, length):
            return self.made[2]
        if self.made is not None:
            native.llama_free(self.made[2])
        params = native.llama_context_default_params()
        params.n_ctx = length * sequences
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.options["threads"]
        params.flash_attn_type = FLASH_ATTENTION[self.options["flash_attention"]]
        context = native.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for {sequences} sequences of {length} tokens")
        self.made = (sequences, length, context)
        return context

    def about(self) -> dict[str, Any]:
        return {"version": llama_cpp.__version__, "system": native.llama_print_system_info().decode()}


class BatchSession:
    """Several sequences in one context, by `llama_decode`. A context of the same size is used again, emptied: making one is
    no part of what is timed, and its first use is slower than the next."""

    def __init__(self, subject: Subject, prompts: list[list[int]], length: int) -> None:
        self.prompts, self.vocab = prompts, subject.vocab
        self.context = subject.context(len(prompts), length)
        native.llama_memory_clear(native.llama_get_memory(self.context), False)
        self.batch = native.llama_batch_init(BATCH, 0, 1)
        self.lengths = [0] * len(prompts)

    def read(self) -> list[int]:
        """Prompts one after another, in pieces of a batch; only the last token of each asks for scores."""
        return [self._prompt(sequence, ids) for sequence, ids in enumerate(self.prompts)]

    def step(self, tokens: list[int]) -> list[int]:
        self.batch.n_tokens = 0
        for sequence, token in enumerate(tokens):
            self._add(sequence, token, wanted=True)
        self._decode()
        return [self._best(row) for row in range(len(tokens))]

    def close(self) -> None:
        native.llama_batch_free(self.batch)

    def _prompt(self, sequence: int, ids: list[int]) -> int:
        for start in range(0, len(ids), BATCH):
            piece = ids[start : start + BATCH]
            self.batch.n_tokens = 0
            for place, token in enumerate(piece, start):
                self._add(sequence, token, wanted=place == len(ids) - 1)
            self._decode()
        return self._best(self.batch.n_tokens - 1)

    def _add(self, sequence: int, token: int, *, wanted: bool) -> None:
        place = self.batch.n_tokens
        self.batch.token[place] = token
        self.batch.pos[place] = self.lengths[sequence]
        self.batch.n_seq_id[place] = 1
        self.batch.seq_id[place][0] = sequence
        self.batch.logits[place] = wanted
        self.batch.n_tokens = place + 1
        self.lengths[sequence] += 1

    def _decode(self) -> None:
        code = native.llama_decode(self.context, self.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode answered {code}")

    def _best(self, row: int) -> int:
        scores = native.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(scores, shape=(self.vocab,)).argmax())


class EvalSession:
    """One sequence by `Llama.eval`."""

    def __init__(self, subject: Subject, prompts: list[list[int]], length: int) -> None:
        options = subject.options
        if subject.whole is None or subject.whole.n_ctx() < length:
            flash = {"auto": None, "off": False, "on": True}[options["flash_attention"]]
            subject.whole = llama_cpp.Llama(
                options["path"],
                n_ctx=length,
                n_batch=BATCH,
                n_threads=options["threads"],
                n_threads_batch=options["threads"],
                verbose=False,
                **({} if flash is None else {"flash_attn": flash}),
            )
        self.whole, self.prompt = subject.whole, prompts[0]
        self.whole.reset()

    def read(self) -> list[int]:
        return self._next(self.prompt)

    def step(self, tokens: list[int]) -> list[int]:
        return self._next(tokens)

    def close(self) -> None:
        self.whole.reset()

    def _next(self, tokens: list[int]) -> list[int]:
        self.whole.eval(tokens)
        scores = native.llama_get_logits_ith(self.whole.ctx, -1)
        return [int(np.ctypeslib.as_array(scores, shape=(self.whole.n_vocab(),)).argmax())]
