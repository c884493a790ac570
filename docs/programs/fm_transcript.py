"""Keep a conversation as JSON, in the format of Apple's framework, and go on from it."""

import asyncio
import json

import orchard.fm as fm


async def main() -> None:
    session = fm.LanguageModelSession("Answer in one short sentence.")
    await session.respond("What is the capital of France?")
    kept = json.dumps(await session.transcript.to_dict())

    transcript = await fm.Transcript.from_dict(json.loads(kept))
    again = fm.LanguageModelSession.from_transcript(transcript)
    print(await again.respond("And of Italy?"))
    print([entry["role"] for entry in json.loads(kept)["transcript"]["entries"]])


asyncio.run(main())
