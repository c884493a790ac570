"""Guides hold every field to what it may be: one of some words, a range, a number of items, a pattern."""

import asyncio

import orchard.fm as fm


@fm.generable
class Review:
    mood: str = fm.guide("How the guest felt", anyOf=["happy", "angry", "bored"])
    stars: int = fm.guide("From 1 to 5", range=(1, 5))
    words: list[str] = fm.guide("Two words for it", count=2, element=fm.GenerationGuide.regex("[a-z]{3,12}"))
    code: str = fm.guide("The code of the hotel", regex=r"[A-Z]{2}-[0-9]{3}")


async def main() -> None:
    session = fm.LanguageModelSession("You read reviews of hotels.")
    review = await session.respond("Hotel AB-123: The room was lovely and the staff were kind!", generating=Review)
    print(review)
    assert review.mood in ("happy", "angry", "bored") and 1 <= review.stars <= 5
    assert len(review.words) == 2 and len(review.code) == 6


asyncio.run(main())
