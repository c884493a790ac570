"""Options: length, temperature, sampling. A seed gives the same answer twice, for typed answers too."""

import asyncio

import orchard.fm as fm


async def main() -> None:
    sampling = fm.SamplingMode.random(top=50, seed=8)
    options = fm.GenerationOptions(sampling=sampling, temperature=1.2, maximum_response_tokens=16)
    first = await fm.LanguageModelSession().respond("Invent a word.", options=options)
    second = await fm.LanguageModelSession().respond("Invent a word.", options=options)
    print(first)
    assert first == second
    greedy = fm.GenerationOptions(sampling=fm.SamplingMode.greedy(), maximum_response_tokens=16)
    print(await fm.LanguageModelSession().respond("Invent a word.", options=greedy))


asyncio.run(main())
