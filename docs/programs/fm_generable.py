"""A typed answer: an instance of a class, whatever the model would rather say."""

import asyncio

import orchard.fm as fm


@fm.generable("A cat that looks for a home")
class Cat:
    name: str
    age: int = fm.guide("Age in years", range=(0, 20))


async def main() -> None:
    session = fm.LanguageModelSession()
    cat = await session.respond("Invent a rescue cat.", generating=Cat)
    print(type(cat).__name__, repr(cat.name), cat.age)
    assert isinstance(cat, Cat) and 0 <= cat.age <= 20


asyncio.run(main())
