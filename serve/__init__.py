"""HTTP server of an engine, with OpenAI's API."""
