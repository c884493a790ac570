"""Ask a question. Written for Apple's SDK: only the import line is another (`import apple_fm_sdk as fm`)."""

import asyncio

import orchard.fm as fm


async def main() -> None:
    model = fm.SystemLanguageModel()
    available, reason = model.is_available()
    if not available:
        print(f"no model here: {reason}")
        return
    session = fm.LanguageModelSession(model=model)
    answer = await session.respond("What is the capital of France?")
    print(answer)


asyncio.run(main())
