"""The session for asyncio, under the names of Apple's Foundation Models SDK. `orchard.fm` is what programs import."""
