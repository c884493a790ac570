"""Models of this machine over HTTP: OpenAI's and Anthropic's protocols, one engine for all clients."""
