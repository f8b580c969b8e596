"""The facts about a tree's shape against their definitions."""

import pytest
import torch
from diversed.verifier.enumerate_laws import delayed, full_tree, paths
from diversed.verifier.tree import Topology, chain, on_device, topology

SHAPES = [(-1,), chain(4), paths(3, 2), delayed(2, paths(2, 3)), full_tree(2, 3), (-1, 0, 0, 1, 1, 1, 2)]


@pytest.mark.parametrize("parents", SHAPES)
def test_paths_depths_and_ancestors_follow_the_parents(parents):
    shape = topology(parents)
    for node, path in enumerate(shape.paths):
        assert path[0] == 0 and path[-1] == node and shape.depths[node] == len(path) - 1
        assert all(parents[below] == above for above, below in zip(path, path[1:], strict=False))
        assert shape.ancestors[node].nonzero().flatten().tolist() == sorted(path)
        padded = shape.padded_paths[node]
        assert padded[: len(path)] == path and set(padded[len(path) :]) <= {node} and len(padded) == shape.depth + 1


@pytest.mark.parametrize("parents", SHAPES)
def test_every_node_is_in_one_level_and_is_a_leaf_or_in_one_family(parents):
    shape, nodes = topology(parents), list(range(len(parents)))
    assert sorted(sum(shape.levels, ())) == nodes and sorted((*shape.leaves, *sum(shape.families, ()))) == nodes
    assert [[shape.depths[node] for node in level] for level in shape.levels] == [
        [depth] * len(level) for depth, level in enumerate(shape.levels)
    ]
    for node, children in enumerate(shape.children):
        assert list(children) == [child for child in nodes[1:] if parents[child] == node]
    for family in shape.families:
        assert len({(shape.depths[node], len(shape.children[node])) for node in family}) == 1


def test_a_chain_is_one_and_paths_are_split_below_their_trunk():
    assert [topology(parents).is_chain for parents in SHAPES] == [True, True, False, False, False, False]
    assert topology(chain(2)).split_paths == ((0, 1, 2), ())
    assert topology(delayed(1, paths(2, 2))).split_paths == ((0, 1), ((2, 4), (3, 5)))
    assert topology(full_tree(2, 2)).split_paths is None
    assert topology((-1, 0, 0, 1)).split_paths is None, "paths of unequal length"


def test_facts_are_computed_once_and_sent_to_a_device_once():
    assert topology((-1, 0, 0)) is topology((-1, 0, 0)) == Topology((-1, 0, 0))
    cpu = torch.device("cpu")
    with torch.inference_mode():
        assert on_device((1, 2), cpu) is on_device((1, 2), cpu) and not on_device((1, 3), cpu).is_inference()
