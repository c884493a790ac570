"""llama.cpp's own quantisation of a GGUF file, and the scores that it gives for rows of tokens. Runs in the peers' environment,
without Orchard."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as native

BATCH = 512


@native.llama_log_callback
def _silence(level: int, text: bytes, data: Any) -> None:
    return None


def task(name: str, options: dict[str, Any]) -> dict[str, Any]:
    native.llama_log_set(_silence, ctypes.c_void_p(0))
    native.llama_backend_init()
    return {"quantise": quantise, "scores": scores}[name](options)


def quantise(options: dict[str, Any]) -> dict[str, Any]:
    """With llama.cpp's defaults, as `llama-quantize FROM TO TYPE` does; no importance matrix."""
    params = native.llama_model_quantize_default_params()
    kind = getattr(native, f"LLAMA_FTYPE_MOSTLY_{options['type']}", None)
    if kind is None:
        raise RuntimeError(f"llama-cpp-python {llama_cpp.__version__} knows no {options['type']}")
    params.ftype = kind
    params.nthread = options["threads"]
    code = native.llama_model_quantize(options["from"].encode(), options["to"].encode(), ctypes.byref(params))
    if code != 0:
        raise RuntimeError(f"llama_model_quantize answered {code}")
    return {"version": llama_cpp.__version__}


def scores(options: dict[str, Any]) -> dict[str, Any]:
    """Scores after every token of every row, one row after another, as float32 into a file."""
    rows = options["rows"]
    model = native.llama_model_load_from_file(options["path"].encode(), native.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp cannot load the model")
    vocab = native.llama_vocab_n_tokens(native.llama_model_get_vocab(model))
    params = native.llama_context_default_params()
    params.n_ctx = -(-max(map(len, rows)) // 256) * 256
    params.n_batch = params.n_ubatch = BATCH
    params.n_threads = params.n_threads_batch = options["threads"]
    context = native.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp has no room for {params.n_ctx} tokens")
    batch = native.llama_batch_init(BATCH, 0, 1)
    with Path(options["to"]).open("wb") as out:
        for row in rows:
            native.llama_memory_clear(native.llama_get_memory(context), True)
            for start in range(0, len(row), BATCH):
                piece = row[start : start + BATCH]
                _fill(batch, piece, start)
                code = native.llama_decode(context, batch)
                if code != 0:
                    raise RuntimeError(f"llama_decode answered {code}")
                np.ctypeslib.as_array(native.llama_get_logits(context), shape=(len(piece), vocab)).tofile(out)
    native.llama_batch_free(batch)
    native.llama_free(context)
    native.llama_model_free(model)
    return {"vocab": vocab, "version": llama_cpp.__version__}


def _fill(batch: Any, piece: list[int], start: int) -> None:
    batch.n_tokens = len(piece)
    for place, token in enumerate(piece):
        batch.token[place] = token
        batch.pos[place] = start + place
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = 0
        batch.logits[place] = True
