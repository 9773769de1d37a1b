"""APIs beside OpenAI's chat completions: each translates its requests to chat requests and formats their output."""
