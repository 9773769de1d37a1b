"""The HTTP server: OpenAI's and other APIs in front, the engine behind one small client interface."""
