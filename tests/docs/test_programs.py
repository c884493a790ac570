"""Every program of docs/programs runs, offline and in no time, and prints what it says; so does every snippet of the guide.

They run in this process and share one loaded model: starting Python thirty times would take longer than all of them.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchard.cli.main import main
from orchard.session.assets import executor_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "docs" / "programs"
GUIDE = ROOT / "docs" / "session.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)

# Program → a pattern in what it prints. Those on a scripted model need no weights.
SCRIPTED = {
    "approve_tool_calls": r"Two letters are on their way\. \['Office, 2nd floor', 'Ada'\]\nnot allowed: \[.*everyone",
    "cancel": r"left after: one two three\s*\ncancelled: .*\nHere I am\. 2",
    "context_policies": r"strict: .*\nwindow: .* without [1-9]\d* older entries\nnothing is lost: 19 entries",
    "endpoint": r"You \|said: \|Hello\|",
    "guardrails": r"Fine\.\nstopped: \w+\n2 entries.*\nstopped: \w+\nFine\.",
    "profiles": r"planner \| Make a plan\. \| 1\. Think.*\nwriter \| Write in German\. \| Es war",
    "testing": r"both tests passed",
}
REAL = {
    "adapters": r"base: .*\nadapted: ",
    "choices_and_regex": r"(positive|negative)\n[12]\d{3}-",
    "dataclass_answer": r"Race\(name=.*day=datetime\.date",
    "fm_content_tagging": r"\['(travel|weather|food|sport)'",
    "fm_errors": r"guide: .*\ntoo long: .*\n.+",
    "fm_generable": r"Cat '.*' \d+",
    "fm_guides": r"Review\(mood='(happy|angry|bored)'",
    "fm_instructions": r"Rome[^\n]*\n.+",
    "fm_nested": r"\[\('.*', \d+\).*\]\n\{\"title\"",
    "fm_options": r".+\n.+",
    "fm_respond": r"Paris",
    "fm_streaming": r".{20}",
    "fm_token_count": r"context: \d+\nprompt: [1-9]\d*\ninstructions: [1-9]\d*\nschema: [1-9]\d*",
    "fm_tools": r".+",
    "fm_transcript": r"Rome[^\n]*\n\['instructions', 'user', 'response'\]",
    "logprobs": r"%   of: .*%",
    "partial_objects": r"(.*\n){4}",
    "pydantic_answer": r"\{\"title\":",
    "save_and_resume": r"cached: [1-9]\d* of",
    "session_basic": r".+\n.+\nread \d+, of these cached [1-9]\d*, wrote",
    "tool_function": r"PromptEntry \| .*\nToolCalls \| price\(.*\nToolOutput \| .*total",
}
LOOPBACK = {"endpoint"}
# The names that Apple's SDK (0.2.1) exports: what an fm_*.py program may use, so that only its import line differs.
SDK = frozenset(
    [
        "SystemLanguageModel",
        "LanguageModelSession",
        "Attachment",
        "ImageAttachment",
        "PromptComponent",
        "Prompt",
        "PromptError",
        "ImagePromptError",
        "Transcript",
        "SystemLanguageModelUseCase",
        "SystemLanguageModelGuardrails",
        "SystemLanguageModelUnavailableReason",
        "Tool",
        "FoundationModelsError",
        "GenerationError",
        "ExceededContextWindowSizeError",
        "AssetsUnavailableError",
        "GuardrailViolationError",
        "UnsupportedGuideError",
        "UnsupportedLanguageOrLocaleError",
        "InvalidGenerationSchemaError",
        "DecodingFailureError",
        "RateLimitedError",
        "ConcurrentRequestsError",
        "RefusalError",
        "ToolCallError",
        "GenerationErrorCode",
        "generable",
        "guide",
        "GenerationSchema",
        "GeneratedContent",
        "GenerationGuide",
        "GuideType",
        "GenerationOptions",
        "SamplingMode",
        "SamplingModeType",
        "GenerationID",
        "ConvertibleFromGeneratedContent",
        "ConvertibleToGeneratedContent",
        "Generable",
    ]
)


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.loopback) if name in LOOPBACK else name for name in sorted(SCRIPTED)],
)
def test_a_program_without_weights(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHARD_FORBID_MODELS", "1")
    printed = run(name, capsys)
    assert re.search(SCRIPTED[name], printed), printed


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Iterator[Any]:
    """While this is held, every session that names the default model shares it."""
    held = executor_of("smollm2")
    yield held
    del held


@pytest.mark.real
@pytest.mark.parametrize("name", sorted(REAL))
def test_a_program_on_the_default_model(name: str, loaded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(name, capsys)
    assert re.search(REAL[name], printed), printed


def test_a_program_is_a_program() -> None:
    """By itself, as people run it."""
    done = subprocess.run([sys.executable, PROGRAMS / "testing.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "both tests passed\n", "")


def test_every_program_is_run_listed_and_small() -> None:
    programs = {path.stem: path for path in PROGRAMS.glob("*.py")}
    assert programs.keys() == SCRIPTED.keys() | REAL.keys() and len(programs) >= 20
    listed = (PROGRAMS / "README.md").read_text(encoding="utf-8")
    for name, path in programs.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert 10 <= len(lines) <= 42, f"{name} has {len(lines)} lines"
        assert f"[{name}.py]({name}.py)" in listed, f"{name} is not in the list"


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("fm_*.py")), ids=lambda path: path.stem)
def test_programs_for_the_sdk_use_its_names_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fm"
    }
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names and names <= SDK
    assert "orchard.fm" in imported and not any("orchard" in name for name in imported - {"orchard.fm"})


@pytest.mark.real
def test_the_guide_tells_the_truth(loaded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its snippets run in order in one module."""
    text = GUIDE.read_text(encoding="utf-8")
    module = ModuleType("guide")
    sys.modules["guide"] = module  # dataclasses look their module up
    try:
        for found in FENCE.finditer(text):
            line = text[: found.start(1)].count("\n")
            code = compile("\n" * line + found[1], str(GUIDE), "exec", dont_inherit=True)
            exec(code, module.__dict__)  # noqa: S102  (our own page)
    finally:
        del sys.modules["guide"]
    assert capsys.readouterr().out
    commands = re.findall(r"^\$ orchard (.*)$", text, re.M)
    assert commands
    for command in commands:
        assert main(shlex.split(command)) == 0 and capsys.readouterr().out, command
