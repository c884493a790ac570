"""Types, a tool and a ready session that the tests of `orchard.fm` share."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import orchard.fm as fm
from orchard.testing import ScriptedModel


@fm.generable("A dog")
class Dog:
    name: str = fm.guide("its name")
    years: int = fm.guide("its age", range=(0, 30))


class Double(fm.Tool):
    name = "double"
    description = "Doubles a number"

    @fm.generable("A number")
    class Arguments:
        number: int

    @property
    def arguments_schema(self) -> fm.GenerationSchema:
        return self.Arguments.generation_schema()

    async def call(self, args: fm.GeneratedContent) -> str:
        self.thread = threading.get_ident()
        await asyncio.sleep(0)
        return str(2 * args.value(int, for_property="number"))


def ready(*answers: Any, **settings: Any) -> tuple[fm.LanguageModelSession, ScriptedModel]:
    model = ScriptedModel(answers, **settings.pop("script", {}))
    instructions, tools = settings.pop("instructions", None), settings.pop("tools", None)
    return fm.LanguageModelSession(instructions, model, tools, guardrails=None, **settings), model
