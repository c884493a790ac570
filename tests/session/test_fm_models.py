"""`SystemLanguageModel`, `LanguageModel`, and the names of the module."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

import orchard.fm as fm
from orchard.core.errors import OrchardError
from orchard.testing import ScriptedModel, scripted

SDK = """
SystemLanguageModel LanguageModelSession Attachment ImageAttachment PromptComponent Prompt PromptError
ImagePromptError Transcript SystemLanguageModelUseCase SystemLanguageModelGuardrails
SystemLanguageModelUnavailableReason Tool FoundationModelsError GenerationError ExceededContextWindowSizeError
AssetsUnavailableError GuardrailViolationError UnsupportedGuideError UnsupportedLanguageOrLocaleError
InvalidGenerationSchemaError DecodingFailureError RateLimitedError ConcurrentRequestsError RefusalError
ToolCallError GenerationErrorCode generable guide GenerationSchema GeneratedContent GenerationGuide GuideType
GenerationOptions SamplingMode SamplingModeType GenerationID ConvertibleFromGeneratedContent
ConvertibleToGeneratedContent Generable
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", SDK)
def test_every_name_of_the_sdk_is_here(name: str) -> None:
    assert getattr(fm, name) is not None and name in fm.__all__ and name in dir(fm)


def test_there_are_forty_names_and_a_few_more() -> None:
    assert len(SDK) == 40 and set(SDK) < set(fm.__all__) == set(fm._HOMES)
    assert all(getattr(fm, name) is not None for name in fm.__all__)


def test_a_star_import_brings_them_all() -> None:
    names: dict[str, Any] = {}
    for name in fm.__all__:
        names[name] = getattr(fm, name)
    assert names["LanguageModel"].__name__ == "LanguageModel"
    with pytest.raises(AttributeError):
        _ = fm.NoSuchName


def test_importing_it_is_cheap() -> None:
    heavy = "'torch' in sys.modules, 'pydantic' in sys.modules, 'llguidance' in sys.modules"
    program = f"import sys, orchard.fm, orchard.testing; print({heavy})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3


def test_the_numbers_of_the_enums() -> None:
    assert [case.value for case in fm.SystemLanguageModelUseCase] == [0, 1]
    assert [case.value for case in fm.SystemLanguageModelGuardrails] == [0, 1]
    assert [case.value for case in fm.SystemLanguageModelUnavailableReason] == [0, 1, 2, 255]
    assert fm.GenerationErrorCode.REFUSAL == 9


def test_errors_are_related_as_in_the_sdk() -> None:
    assert issubclass(fm.GenerationError, fm.FoundationModelsError)
    assert issubclass(fm.RefusalError, fm.GenerationError) and issubclass(fm.FoundationModelsError, OrchardError)
    assert not issubclass(fm.PromptError, fm.FoundationModelsError)


def test_a_model_that_is_not_there(empty_home: Any) -> None:
    assert fm.SystemLanguageModel().is_available() == (
        False,
        fm.SystemLanguageModelUnavailableReason.MODEL_NOT_READY,
    )
    session = fm.LanguageModelSession()  # nothing is loaded before somebody asks
    with pytest.raises(fm.AssetsUnavailableError):
        asyncio.run(session.respond("go"))
    with pytest.raises(fm.AssetsUnavailableError):
        _ = fm.SystemLanguageModel().context_size


def test_context_size_and_capabilities() -> None:
    model = fm.LanguageModel(ScriptedModel(context_size=77, capabilities=frozenset({"tools"})))
    assert model.context_size == 77 and model.capabilities == {"tools"} and model.is_available() == (True, None)
    assert "scripted" in repr(model)


def test_token_counts() -> None:
    @fm.generable
    class One:
        name: str

    def tool(x: int) -> int:
        """Does something."""
        return x

    async def main() -> None:
        model = fm.LanguageModel(ScriptedModel())
        short, long = await model.token_count("a"), await model.token_count("a b c d")
        assert 0 < short < long == await model.token_count("a b c d")
        assert await model.token_count(["a", "b"]) > 0
        assert await model.token_count(instructions="a b") > 0
        assert await model.token_count(One.generation_schema()) > 0
        assert await model.token_count([tool]) > 0 and await model.token_count([]) == 0
        assert await model.token_count(fm.Transcript()) == 0
        with pytest.raises(ValueError):
            await model.token_count()
        with pytest.raises(ValueError):
            await model.token_count("a", instructions="b")

    asyncio.run(main())


def test_guardrails_and_use_cases() -> None:
    permissive = fm.SystemLanguageModelGuardrails.PERMISSIVE_CONTENT_TRANSFORMATIONS
    model = fm.SystemLanguageModel(fm.SystemLanguageModelUseCase.CONTENT_TAGGING, permissive)
    assert (model.use_case, model.guardrails) == ("content_tagging", "permissive")
    assert fm.LanguageModel("x", guardrails="strict").guardrails == "strict"


def test_an_unknown_use_case_is_the_general_one_with_a_warning() -> None:
    class Odd:
        value = 9

    with pytest.warns(UserWarning, match="use case"):
        assert fm.SystemLanguageModel(use_case=Odd()).use_case == "general"  # type: ignore[arg-type]


def test_what_a_session_takes_as_a_model() -> None:
    with scripted(["a", "b", "c"]):
        for model in (None, "smollm2", fm.SystemLanguageModel()):
            assert asyncio.run(fm.LanguageModelSession(model=model).respond("go")) in "abc"
    with pytest.raises(OrchardError):
        fm.LanguageModelSession(model=7)
