"""Classes inside classes, and lists of them. Nested content comes back as instances, and goes out again as JSON."""

import asyncio
from typing import Optional

import orchard.fm as fm


@fm.generable
class Ingredient:
    name: str
    grams: int = fm.guide(range=(1, 999))


@fm.generable
class Recipe:
    title: str
    ingredients: list[Ingredient] = fm.guide(min_items=1, max_items=2)
    note: Optional[str]  # noqa: UP045  (the SDK's way to write it; `str | None` works as well)


async def main() -> None:
    session = fm.LanguageModelSession()
    recipe = await session.respond("Give me a recipe for pancakes.", generating=Recipe)
    print(recipe.title, [(part.name, part.grams) for part in recipe.ingredients])
    print(recipe.generated_content.to_json())
    assert all(isinstance(part, Ingredient) for part in recipe.ingredients)


asyncio.run(main())
