"""isobit against transformers: the same weights and tokens through both, every difference traced to a discrete choice.

Needs the optional extra `isobit[fidelity]`; nothing here is imported by the rest of the package.
"""
