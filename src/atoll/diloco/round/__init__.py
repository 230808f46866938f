"""The outer round: replicas average pseudo-gradients through an object store.

`protocol` is the machine that decides, as generators of `effects`; it has no clock, thread, network
or numpy. `objects` are the keys and small objects in the store.
"""
