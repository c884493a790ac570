"""Errors are typed, say what happened, and leave the session usable and the transcript as it was."""

import asyncio

import orchard.fm as fm


@fm.generable
class Wrong:
    name: str = fm.guide(range=(1, 5))  # a range on a text


async def main() -> None:
    session = fm.LanguageModelSession()
    try:
        await session.respond("Hello", generating=Wrong)
    except fm.UnsupportedGuideError as error:
        print("guide:", error)
    try:
        await session.respond("word " * 20_000)
    except fm.ExceededContextWindowSizeError as error:
        print("too long:", error)
    except fm.GenerationError as error:
        print("something else:", error)
    print(await session.respond("Say hello.", options=fm.GenerationOptions(maximum_response_tokens=8)))


asyncio.run(main())
