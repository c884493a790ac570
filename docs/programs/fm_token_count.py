"""How much of the context something takes: a prompt, instructions, a schema."""

import asyncio

import orchard.fm as fm


@fm.generable
class Point:
    x: int
    y: int


async def main() -> None:
    model = fm.SystemLanguageModel()
    print("context:", model.context_size)
    print("prompt:", await model.token_count("How many tokens is this?"))
    print("instructions:", await model.token_count(instructions="Be brief."))
    print("schema:", await model.token_count(Point.generation_schema()))


asyncio.run(main())
