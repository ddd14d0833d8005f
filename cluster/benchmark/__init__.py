"""Speed: of any OpenAI-compatible server, of the engine, of several ranks."""
