"""Many engines as one: KV events, the router of requests, KV transfer."""
