"""`jitllmd`: the server, and the verbs that talk to one.

`serve` puts models behind the HTTP edge. Every other verb is a client of the control plane, and
needs nothing but the standard library.
"""
