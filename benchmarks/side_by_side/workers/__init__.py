"""One module a peer, run as a process by that peer's own Python.

They meet the rest over a pipe only. But for `engine`, which is ours, they import the peer's
packages and the standard library, nothing of specdec.
"""
