"""`list`, `show`, `rm`, `pull` and `doctor`, on a library with a small GGUF file and a small folder."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from orchard.cli import doctor
from orchard.cli.main import main
from orchard.weights.gguf.types import GGMLType
from orchard.weights.gguf.writer import TensorOut, write_gguf
from orchard.weights.library import Library

CHECKOUT = Path(__file__).resolve().parents[2]
TEMPLATE = "{{ messages[0]['content'] }}\n"
SHAPES = {
    "token_embd.weight": ((64, 32), GGMLType.F16),
    "blk.0.attn_norm.weight": ((32,), GGMLType.F32),
    "blk.0.attn_q.weight": ((32, 32), GGMLType.Q8_0),
    "blk.0.attn_k.weight": ((16, 32), GGMLType.Q8_0),
    "blk.0.attn_v.weight": ((16, 32), GGMLType.Q4_0),
    "blk.0.attn_output.weight": ((32, 32), GGMLType.Q8_0),
    "blk.0.ffn_gate.weight": ((64, 32), GGMLType.Q8_0),
    "blk.0.ffn_up.weight": ((64, 32), GGMLType.Q8_0),
    "blk.0.ffn_down.weight": ((32, 64), GGMLType.Q8_0),
    "blk.0.ffn_norm.weight": ((32,), GGMLType.F32),
    "output_norm.weight": ((32,), GGMLType.F32),
}
METADATA = {
    "general.architecture": "llama",
    "general.license": "mit",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 64,
    "tokenizer.chat_template": TEMPLATE,
}


def write_small_gguf(path: Path, metadata: dict[str, object] | None = None) -> Path:
    def zeros(kind: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(kind.nbytes(shape), np.uint8)

    tensors = [
        TensorOut(name, shape, kind, lambda kind=kind, shape=shape: zeros(kind, shape))  # type: ignore[misc]
        for name, (shape, kind) in SHAPES.items()
    ]
    write_gguf(path, metadata or METADATA, tensors)
    return path


@pytest.fixture
def library(empty_home: Path) -> Library:
    library = Library(empty_home)
    with library.lock("small"), library.add("small", source="test", version="1", licence="mit") as folder:
        write_small_gguf(folder / "model.gguf")
    return library


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    return out, err


def test_list_of_nothing_names_the_next_step(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "list")
    assert out == "" and "orchard pull smollm2" in err
    out, _ = run(capsys, "list", "--json")
    assert json.loads(out) == {"home": str(empty_home), "models": [], "available": []}


def test_list(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "list")
    heading, row = out.splitlines()
    assert heading.split() == ["name", "family", "size", "quantisation", "source"]
    size = (library.models / "small" / "model.gguf").stat().st_size
    assert row.split()[:2] == ["small", "llama"] and "Q8_0" in row and row.split()[-1] == "test" and err == ""
    (model,) = json.loads(run(capsys, "list", "--json")[0])["models"]
    assert (model["bytes"], model["family"], model["quantisation"], model["licence"]) == (size, "llama", "Q8_0", "mit")


def test_list_shows_damage_and_goes_on(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    (library.models / "broken").mkdir()
    with library.lock("wrong"), library.add("wrong", source="test") as folder:
        (folder / "model.gguf").write_bytes(b"not a GGUF file at all")
    out, err = run(capsys, "list")
    assert len(out.splitlines()) == 4 and out.count("damaged:") == 2
    assert "orchard rm broken" in err and "orchard pull wrong" in err
    run(capsys, "rm", "broken", "--yes")
    run(capsys, "rm", "wrong", "--yes")
    assert [entry.name for entry in library.list()] == ["small"]


def test_show(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "show", "small")
    for text in ("llama", "4 of width 8, 2 for keys and values", "128 tokens", "mit", "1 of width 32", "mostly Q8_0"):
        assert text in out
    facts = json.loads(run(capsys, "show", "small", "--json")[0])
    assert facts["bytes"] == (library.models / "small" / "model.gguf").stat().st_size
    assert facts["parameters"] == sum(int(np.prod(shape)) for shape, _ in SHAPES.values())
    assert facts["template"] == {"text": TEMPLATE, "sha256": hashlib.sha256(TEMPLATE.encode()).hexdigest()}
    rows = {(row["kind"], row["type"]): (row["count"], row["bytes"]) for row in facts["tensors"]}
    assert rows == {
        ("attention", "Q8_0"): (3, 34 * (32 + 16 + 32)),
        ("attention", "Q4_0"): (1, 18 * 16),
        ("mlp", "Q8_0"): (3, 34 * (64 + 64 + 64)),
        ("embedding", "F16"): (1, 64 * 32 * 2),
        ("norm", "F32"): (3, 3 * 32 * 4),
    }
    assert run(capsys, "show", "small", "--template")[0] == TEMPLATE + "\n"
    tree, _ = run(capsys, "show", "small", "--config")
    assert "Decoder" in tree and "heads: 4" in tree


def test_show_takes_a_path_and_brings_no_torch(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(library.models / "small" / "model.gguf")
    assert json.loads(run(capsys, "show", path, "--json")[0])["family"] == "llama"
    program = (
        "import sys; from orchard.cli.main import main; main(sys.argv[1:]); main(['list'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, "show", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_show_of_a_folder(tmp_path: Path, empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import save_file

    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 16,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "T"}))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(16, 8, dtype=torch.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16),
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16),
        "model.layers.0.mlp.gate.weight": torch.zeros(8, 8, dtype=torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.zeros(8),
        "lm_head.weight": torch.zeros(16, 8, dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    facts = json.loads(run(capsys, "show", str(folder), "--json")[0])
    assert facts["quantisation"] == "BF16" and facts["template"]["text"] == "T" and facts["head_width"] == 4
    assert [row["kind"] for row in facts["tensors"]] == ["router", "experts", "attention", "embedding", "head", "norm"]
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide", "num_attention_heads": 0}))
    facts = json.loads(run(capsys, "show", str(folder), "--json")[0])
    assert facts["width"] is None and facts["head_width"] is None
    run(capsys, "show", str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))
    _, err = run(capsys, "show", str(folder), code=1)
    assert err.startswith("error: unknown architecture 'lama'") and "llama" in err


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 100, b"x" * 100])
def test_show_of_a_broken_file_is_one_clear_line(
    content: bytes, tmp_path: Path, empty_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    out, err = run(capsys, "show", str(path), code=1)
    assert out == "" and err.count("\n") == 2 and err.startswith("error: ") and "unexpected" not in err


def test_rm_needs_a_yes(library: Library, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    _, err = run(capsys, "rm", "small", code=2)
    assert "orchard rm small --yes" in err and library.find("small") is not None
    out, _ = run(capsys, "rm", "small", "--yes", "--json")
    assert json.loads(out)["removed"] == "small"
    assert library.find("small") is None
    _, err = run(capsys, "rm", "small", "--yes", code=2)
    assert "no model called 'small'" in err


def test_pull_of_nothing_known_and_offline(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(capsys, "pull", "no-such-model", code=2)
    assert "org/name" in err
    _, err = run(capsys, "pull", "smollm2", "--offline", code=1)
    assert "without --offline" in err
    _, err = run(capsys, "pull", "org/name", "--offline", code=1)
    assert "without --offline" in err
    assert Library(empty_home).leftovers() == 0


def test_pull_of_what_is_here_says_so(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = Library(empty_home)
    with library.lock("smollm2"), library.add("smollm2", source="test") as folder:
        write_small_gguf(folder / "model.gguf")
    out, err = run(capsys, "pull", "smollm2")
    assert out == "" and "already here and whole" in err
    assert run(capsys, "pull", "smollm2", "--quiet") == ("", "")
    assert json.loads(run(capsys, "pull", "smollm2", "--json", "--offline")[0])["name"] == "smollm2"


def test_doctor_tells_facts_and_fixes(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "doctor")
    assert "python" in out and "torch" in out and "small" in out
    facts = json.loads(run(capsys, "doctor", "--json")[0])
    assert facts["problems"] == [] and facts["library"]["models"] == ["small"]
    assert facts["memory"]["total"] > 0 and facts["library"]["disk_free"] > 0
    for extra, state in facts["extras"].items():
        assert bool(state["missing"]) == bool(state["fix"])
        fix = shlex.split(state["fix"])  # of a checkout: the package index may know another orchard
        assert not fix or fix == [sys.executable, "-m", "pip", "install", "-e", f"{CHECKOUT}[{extra}]"]


def test_doctor_fails_when_something_needed_is_missing(
    empty_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.REQUIRED, "no_such_module", "no-such-package")
    out, _ = run(capsys, "doctor", code=1)
    assert "no-such-package is not installed" in out and "-m pip install no-such-package" in out


def test_doctor_tells_what_is_wrong_with_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCHARD_HOME", str(tmp_path / "home"))
    with pytest.raises(RuntimeError), Library().add("org/half", source="test", keep_partial=True) as folder:
        (folder / "part").write_bytes(b"1234")
        raise RuntimeError
    out, _ = run(capsys, "doctor")
    assert "4 B held by unfinished work on org/half" in out
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORCHARD_HOME", str(tmp_path / "file"))
    out, _ = run(capsys, "doctor", code=1)
    assert "is not a folder; mend it: set ORCHARD_HOME" in out
    assert json.loads(run(capsys, "doctor", "--json", code=1)[0])["library"]["disk_free"] is None


def test_rm_asks_also_about_an_unfinished_pull(
    empty_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be running, and would be whole by the time that rm gets its turn."""
    with pytest.raises(RuntimeError), Library().add("org/half", source="test", keep_partial=True) as folder:
        (folder / "part").write_bytes(b"1234")
        raise RuntimeError
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    _, err = run(capsys, "rm", "org/half", code=2)
    assert "unfinished pull" in err and Library().leftovers() == 4
    _, err = run(capsys, "rm", "org/half", "--yes")
    assert "removed org/half (4 B)" in err and Library().leftovers() == 0


def test_doctor_knows_what_the_package_declares() -> None:
    declared = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    bare = {extra: {_name(line) for line in lines} for extra, lines in declared["optional-dependencies"].items()}
    assert set(doctor.REQUIRED.values()) == {_name(line) for line in declared["dependencies"]}
    assert {extra: set(names.values()) for extra, names in doctor.EXTRAS.items()} == {
        extra: names for extra, names in bare.items() if extra != "dev"
    }


def _name(requirement: str) -> str:
    return requirement.split(">")[0].split("=")[0].split("<")[0].split("[")[0].strip()
