"""The command line: one file for each verb, and what they share.

Knows the Engine port, and asks `compose` for an engine. Imports what is heavy where it is used,
because a short run is mostly start.
"""
