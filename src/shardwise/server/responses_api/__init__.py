"""POST /v1/responses: OpenAI's API of items, with answers that are kept for the next turn."""
