"""The exactness matrix: random requests under every way of computing them, compared byte for byte with the oracle."""
