"""A relay tree as text: nodes by number, children indented below their parent. Pure; called by `plan.tell`.

Invariant: a line is as deep as the branchings above it, so that a chain of any length takes one line a zone; every
node is on exactly one line, by name or between two names.
"""

from collections.abc import Iterator, Sequence

from laminar_py.relay.planning.topology import Topology

_NAMED = 4  # of a longer row, the first two and the last are named


def draw(tree: Topology, zones: Sequence[str]) -> list[str]:
    """Lines of a tree over nodes of these zones ([N] labels).

    `4 > 5` is a node and its only child, `4, 5` are children without their own, and `->` begins the only child of
    the line above, in another zone; a zone is named where it is entered.
    """
    lines = []
    rows = [(0, "", [0])]  # still to be drawn, last first: indentation, arrow, nodes
    while rows:
        indent, arrow, row = rows.pop()
        leaves = len(row) > 1
        if not leaves:
            row = _run(tree, zones, row[0])
        above = tree.parents[row[0]]
        entered = above is None or zones[above] != zones[row[0]]
        zone = f"{zones[row[0]]}: " if entered and zones[row[0]] else ""
        lines.append(" " * indent + arrow + zone + _names(row, ", " if leaves else " > "))
        below = [] if leaves else list(_rows(tree, zones, row[-1]))
        only = len(tree.children(row[-1])) == 1
        rows += [(indent, "-> ", nodes) if only else (indent + 2, "", nodes) for nodes in reversed(below)]
    return lines


def _run(tree: Topology, zones: Sequence[str], node: int) -> list[int]:
    """The node and those below it in its zone for as long as there is one child each."""
    run = [node]
    while len(children := tree.children(run[-1])) == 1 and zones[children[0]] == zones[node]:
        run.append(children[0])
    return run


def _rows(tree: Topology, zones: Sequence[str], node: int) -> Iterator[list[int]]:
    """Children of a node; neighbours that are leaves of its own zone share a row."""
    leaves: list[int] = []
    for child in tree.children(node):
        if not tree.children(child) and zones[child] == zones[node]:
            leaves.append(child)
            continue
        if leaves:
            yield leaves
            leaves = []
        yield [child]
    if leaves:
        yield leaves


def _names(row: Sequence[int], between: str) -> str:
    if len(row) <= _NAMED:
        return between.join(map(str, row))
    return between.join([*map(str, row[:2]), "..", str(row[-1])]) + f" ({len(row)} nodes)"
