"""No file needs, directly or through others, itself: imports inside functions and for types count like any other."""

from tests.structure import source


def graph():
    """File → the files it imports. What a package re-exports counts as an import of the file that defines it."""
    edges = {}
    for module in source.modules():
        targets = set()
        for target, name in source.imported(module):
            targets |= source.resolve(target, name)
        edges[module] = sorted(targets - {module})
    return edges


def circles(edges):
    """One circle for each knot of files that need each other (Tarjan), as a list of names."""
    index, low, stack, knots = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            knot = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(knot) > 1:
                knots.append(shortest_way_round(edges, node, knot))

    for node in edges:
        if node not in index:
            visit(node)
    return knots


def shortest_way_round(edges, node, knot):
    ways = [[node]]
    seen = set()
    while ways:
        way = ways.pop(0)
        for target in edges[way[-1]]:
            if target == node:
                return [*way, node]
            if target in knot and target not in seen:
                seen.add(target)
                ways.append([*way, target])
    raise AssertionError(f"{node} is in no circle")


def test_a_circle_is_found_and_named():
    edges = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": []}
    assert circles(edges) == [["a", "b", "c", "a"]]
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []


def test_no_circle_of_imports():
    found = circles(graph())
    assert not found, "circles of imports:\n" + "\n".join(" → ".join(circle) for circle in found)
