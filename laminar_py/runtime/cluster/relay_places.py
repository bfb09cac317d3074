"""Hosts of a run's relays, by those of its learner and replicas. Pure; called by `cluster.placement`.

Invariant: the root is beside learner rank 0, every host that has replicas has a relay, and a relay that lives and
is needed keeps its number, its host and those who pull from it, whatever the fleet becomes.
"""

from collections.abc import Collection, Sequence


def place_relays(
    num_relays: int,
    *,
    learner: Sequence[str | None],
    hosts: Sequence[str | None],
    alive: Collection[str],
    before: Sequence[str | None],
) -> tuple[str | None, ...]:
    """Host of each relay: the root's, and one for each other host of a replica; on a single node `num_relays`.

    `learner` and `hosts` are of ranks and replicas, `before` is of the plan before. None: nobody needs it now.
    """
    root, hosts = learner[0], list(dict.fromkeys(hosts))
    # those of a run that had one node stay there, since its replicas pull from them
    relays = [host if host in alive and (host in hosts or host == root) else None for host in before[1:]]
    if not relays and {root, *learner, *hosts} == {root}:
        relays = [root] * (num_relays - 1)
    for host in hosts:
        if host != root and host not in relays:
            if None in relays:
                relays[relays.index(None)] = host
            else:
                relays.append(host)
    gaps = max(0, len(before) - 1 - len(relays))  # an index in use stays within range
    return (root, *relays, *[None] * gaps)
