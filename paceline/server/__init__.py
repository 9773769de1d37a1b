"""The HTTP server: OpenAI's interface on one side, an engine behind one small client on the other."""
