"""A radix tree over token ids: values at rows of token sequences that share their prefixes."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

Value = TypeVar("Value")
Tokens = Sequence[int] | np.ndarray
TOKEN_BYTES = 4


class Node(Generic[Value]):
    """A row of some sequence. `edge`: the tokens between the parent's row and this one, int32 as bytes.

    A node lives as long as its value is in the tree, whatever is inserted or removed beside it.
    """

    __slots__ = ("children", "edge", "parent", "rows", "value")

    def __init__(self, edge: bytes, rows: int, parent: "Node[Value] | None", value: Value | None = None):
        self.edge = edge
        self.rows = rows
        self.parent = parent
        self.value = value
        self.children: dict[bytes, Node[Value]] = {}

    def above(self) -> "Node[Value] | None":
        """The nearest node towards the root that has a value."""
        node = self.parent
        while node is not None and node.value is None:
            node = node.parent
        return node

    def tokens(self) -> np.ndarray:
        """int32 [rows], the whole sequence up to this row."""
        edges, node = [], self
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return np.frombuffer(b"".join(edges[::-1]), np.int32)


class RadixTree(Generic[Value]):
    """Values by token sequence, one node a value or branch; edges are compared as bytes, whole.

    Every leaf has a value, and a node without one has at least two children (the root aside).
    """

    def __init__(self) -> None:
        self._root: Node[Value] = Node(b"", 0, None)

    def insert(self, tokens: Tokens, value: Value) -> Node[Value]:
        """Put a value at the end of `tokens` (at least one), in the place of one that is there."""
        sequence = as_tokens(tokens)
        if not len(sequence):
            raise ValueError("a value needs at least one token")
        node, matched = self._descend(sequence)
        if node.rows > matched:
            node = self._split(node, matched)
        if matched < len(sequence):
            leaf = Node(sequence[matched:].tobytes(), len(sequence), node, value)
            node.children[leaf.edge[:TOKEN_BYTES]] = leaf
            return leaf
        node.value = value
        return node

    def find(self, tokens: Tokens) -> Node[Value] | None:
        """The node of exactly these tokens, if it has a value."""
        sequence = as_tokens(tokens)
        node, matched = self._descend(sequence)
        return node if matched == node.rows == len(sequence) and node.value is not None else None

    def path(self, tokens: Tokens) -> list[Node[Value]]:
        """The nodes with a value whose whole sequence `tokens` begins with, fewest rows first."""
        node, matched = self._descend(as_tokens(tokens))
        found: list[Node[Value]] = []
        last = node if node.rows <= matched else node.parent
        while last is not None:
            if last.value is not None:
                found.append(last)
            last = last.parent
        return found[::-1]

    def nearest(self, tokens: Tokens) -> tuple[Node[Value] | None, int]:
        """A node with a value that shares the longest prefix with `tokens`, and the length of that prefix."""
        node, matched = self._descend(as_tokens(tokens))
        while node.value is None and node.children:
            node = next(iter(node.children.values()))
        return (node, matched) if node.value is not None else (None, 0)

    def remove(self, node: Node[Value]) -> None:
        """Take a node's value out of the tree."""
        node.value = None
        parent = node.parent
        if not node.children and parent is not None:
            del parent.children[node.edge[:TOKEN_BYTES]]
            self._merge(parent)
        else:
            self._merge(node)

    def __iter__(self) -> Iterator[Node[Value]]:
        """All nodes with a value."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node.value is not None:
                yield node

    def _descend(self, sequence: np.ndarray) -> tuple[Node[Value], int]:
        """The deepest node whose edge `sequence` enters, and how many tokens it shares with that node's sequence."""
        data, place = sequence.tobytes(), 0
        node = self._root
        while (child := node.children.get(data[place : place + TOKEN_BYTES])) is not None:
            if not data.startswith(child.edge, place):
                edge = np.frombuffer(child.edge, np.int32)
                return child, node.rows + shared_prefix(edge, sequence[node.rows :])
            place += len(child.edge)
            node = child
        return node, node.rows

    def _split(self, node: Node[Value], rows: int) -> Node[Value]:
        """Cut the edge of `node` at `rows`; the upper part is the new node."""
        parent = node.parent
        assert parent is not None
        cut = (rows - parent.rows) * TOKEN_BYTES
        upper = Node[Value](node.edge[:cut], rows, parent)
        parent.children[upper.edge[:TOKEN_BYTES]] = upper
        node.edge = node.edge[cut:]
        node.parent = upper
        upper.children[node.edge[:TOKEN_BYTES]] = node
        return upper

    def _merge(self, node: Node[Value]) -> None:
        """Join a node that is neither value nor branch with its only child."""
        if node.parent is None or node.value is not None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        child.edge = node.edge + child.edge
        child.parent = node.parent
        node.parent.children[child.edge[:TOKEN_BYTES]] = child


def as_tokens(tokens: Tokens) -> np.ndarray:
    """Token ids as int32 [n]; an int32 array is taken as it is."""
    return np.asarray(tokens, dtype=np.int32)


def shared_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences share from their beginning."""
    length = min(len(a), len(b))
    differs = as_tokens(a)[:length] != as_tokens(b)[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
