"""Decoding: an engine folder in memory, the loop, the accept rules and what drafts for them."""
