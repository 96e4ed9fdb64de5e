"""Is a running server lossless, and does its speculation work? docs/audit.md is its page."""
