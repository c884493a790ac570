"""OpenAI's protocol: chat completions, completions, responses, embeddings, models."""
