"""The use case content tagging: what a text is about, as a few tags."""

import asyncio

import orchard.fm as fm


@fm.generable
class Tags:
    topics: list[str] = fm.guide(
        "What it is about", anyOf=["travel", "weather", "food", "sport"], min_items=1, max_items=2
    )


async def main() -> None:
    model = fm.SystemLanguageModel(use_case=fm.SystemLanguageModelUseCase.CONTENT_TAGGING)
    session = fm.LanguageModelSession(model=model)
    tags = await session.respond("The ferry to the island was late because of a storm.", generating=Tags)
    print(tags.topics)
    assert 1 <= len(tags.topics) <= 2 and set(tags.topics) <= {"travel", "weather", "food", "sport"}


asyncio.run(main())
