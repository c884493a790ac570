"""Instructions, and a second question that leans on the first: a session remembers."""

import asyncio

import orchard.fm as fm


async def main() -> None:
    session = fm.LanguageModelSession("Answer in one short sentence.")
    options = fm.GenerationOptions(maximum_response_tokens=40)
    print(await session.respond("What is the capital of Italy?", options=options))
    print(await session.respond("What is that city famous for?", options=options))


asyncio.run(main())
