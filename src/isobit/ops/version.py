"""The version of the arithmetic that docs/arithmetic.md defines."""

ARITHMETIC_VERSION = "1"  # another one whenever the defined bits of any op change
