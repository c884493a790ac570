"""A load generator for any endpoint that speaks OpenAI's protocol: what is sent, how it is sent, what came of it."""
