"""Stream an answer. Each item is the whole text so far, as in Apple's SDK; the event loop goes on meanwhile."""

import asyncio

import orchard.fm as fm


async def main() -> None:
    session = fm.LanguageModelSession()
    options = fm.GenerationOptions(maximum_response_tokens=40)
    shown = 0
    async for snapshot in session.stream_response("Tell me about the sea.", options=options):
        print(snapshot[shown:], end="", flush=True)
        shown = len(snapshot)
    print()


asyncio.run(main())
