"""Files and batches, as OpenAI's Batch API has them: `/v1/files` and `/v1/batches`."""
