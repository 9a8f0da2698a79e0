"""The radix tree against a plain dictionary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.engine.radix import Node, RadixTree, shared_prefix

# Two tokens, so that sequences share prefixes, diverge in the middle of edges and end inside each other.
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
actions = st.lists(st.tuples(st.sampled_from(["insert", "insert", "remove"]), sequences), max_size=40)


def build(actions) -> tuple[RadixTree, dict[tuple[int, ...], int]]:
    tree: RadixTree[int] = RadixTree()
    values: dict[tuple[int, ...], int] = {}
    for number, (action, tokens) in enumerate(actions):
        if action == "insert":
            node = tree.insert(tokens, number)
            assert node.rows == len(tokens)
            values[tokens] = number
        elif tokens in values:
            tree.remove(tree.find(tokens))
            del values[tokens]
    return tree, values


def contents(tree: RadixTree) -> dict[tuple[int, ...], int]:
    return {tuple(node.tokens().tolist()): node.value for node in tree}


@settings(max_examples=80, deadline=None)
@given(actions=actions, asked=sequences)
def test_it_answers_as_a_dictionary_of_sequences_does(actions, asked):
    tree, values = build(actions)
    assert contents(tree) == values
    found = tree.find(asked)
    assert (None if found is None else found.value) == values.get(asked)
    prefixes = [asked[:rows] for rows in range(1, len(asked) + 1) if asked[:rows] in values]
    assert [node.value for node in tree.path(asked)] == [values[prefix] for prefix in prefixes]
    node, shared = tree.nearest(asked)
    longest = max((naive_shared(asked, other) for other in values), default=0)
    assert shared == (longest if values else 0)
    assert (node is None) == (not values)
    if node is not None:
        assert naive_shared(asked, tuple(node.tokens().tolist())) == longest


@settings(max_examples=50, deadline=None)
@given(actions=actions)
def test_edges_stay_compressed_and_nodes_know_what_is_above(actions):
    tree, values = build(actions)
    for node in tree:
        tokens = tuple(node.tokens().tolist())
        above = [tokens[:rows] for rows in range(1, len(tokens)) if tokens[:rows] in values]
        found = node.above()
        assert (None if found is None else found.value) == (values[above[-1]] if above else None)
    pending: list[Node] = [tree._root]
    while pending:
        node = pending.pop()
        for first, child in node.children.items():
            assert child.parent is node
            assert child.edge.startswith(first)
            assert child.rows * 4 == node.rows * 4 + len(child.edge)
        assert node.parent is None or node.value is not None or len(node.children) > 1
        pending.extend(node.children.values())


def test_a_node_stays_itself_while_others_come_and_go():
    tree: RadixTree[str] = RadixTree()
    kept = tree.insert([1, 2, 3, 4], "kept")
    for other in ([1, 2], [1, 2, 9], [1, 2, 3, 4, 5], [1]):
        tree.insert(other, "other")
    assert tree.find([1, 2, 3, 4]) is kept
    for node in [node for node in tree if node.value == "other"]:
        tree.remove(node)
    assert tree.find([1, 2, 3, 4]) is kept
    assert contents(tree) == {(1, 2, 3, 4): "kept"}
    tree.remove(kept)
    assert not tree._root.children


def test_token_arrays_that_the_caller_changes_later_do_not_change_the_tree():
    tree: RadixTree[str] = RadixTree()
    tokens = np.array([5, 6, 7], np.int32)
    tree.insert(tokens, "value")
    tokens[:] = 0
    assert contents(tree) == {(5, 6, 7): "value"}


def test_a_value_needs_a_token():
    with pytest.raises(ValueError, match="at least one token"):
        RadixTree().insert([], "value")


def test_long_prompts_cost_no_python_work_a_token():
    """100,000 tokens with a thousand values: each look-up compares arrays, so a few thousand take seconds at most."""
    tree: RadixTree[int] = RadixTree()
    prompt = np.random.default_rng(0).integers(0, 250_000, 100_000).astype(np.int32)
    for rows in range(100, 100_001, 100):
        tree.insert(prompt[:rows], rows)
    assert [node.value for node in tree.path(prompt)][-1] == 100_000
    changed = prompt.copy()
    changed[61_234] += 1
    assert tree.path(changed)[-1].rows == 61_200
    assert tree.nearest(changed)[1] == 61_234


def naive_shared(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(a=st.lists(st.integers(0, 1), max_size=6), b=st.lists(st.integers(0, 1), max_size=6))
def test_shared_prefix(a, b):
    assert shared_prefix(a, b) == naive_shared(a, b)
