"""HTTP server of an engine, with the APIs of OpenAI, Anthropic and Ollama."""
