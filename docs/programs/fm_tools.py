"""A tool that the model may call. Its arguments always match the schema, however small the model."""

import asyncio

import orchard.fm as fm


@fm.generable
class City:
    city: str = fm.guide("The name of a city", anyOf=["Paris", "Rome", "Oslo"])


class Weather(fm.Tool):
    name = "weather"
    description = "The weather in a city right now"

    @property
    def arguments_schema(self) -> fm.GenerationSchema:
        return City.generation_schema()

    async def call(self, args: fm.GeneratedContent) -> str:
        city = args.value(str, for_property="city")
        print(f"(the tool was called for {city})")
        return f"It is 21 degrees and sunny in {city}."


async def main() -> None:
    session = fm.LanguageModelSession("Use the tool to answer.", tools=[Weather()])
    options = fm.GenerationOptions(maximum_response_tokens=60)
    print(await session.respond("What is the weather in Paris?", options=options))


asyncio.run(main())
