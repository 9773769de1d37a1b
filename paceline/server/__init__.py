"""The HTTP server: OpenAI's API in front, the engine behind one small client interface."""
