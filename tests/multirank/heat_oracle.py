"""DASO written down a second time: all ranks' parameters in one list, straight from the rules."""

import torch


def slopes(rank, batch, size):
    """The gradient of a rank in a batch, independent of the parameters."""
    g = torch.Generator().manual_seed(1000 * batch + rank)
    return torch.randn(size, generator=g, dtype=torch.float64)


def oracle(nodes, skips, batches, size, lr, start):
    """Parameters of all ranks after one epoch of `batches` batches, and (batch, kind, group) events."""
    gs, ls, btw = skips
    last, count = batches - 1, sum(map(len, nodes))
    p = [start.clone() for _ in range(count)]
    groups = max(map(len, nodes)) if len(nodes) > 1 else 0
    events, turn, flying = [], 0, None

    def members(group):
        return [node[group % len(node)] for node in nodes]

    def weighted_mean(ranks, values):
        return sum(v * len(node) for v, node in zip(values, nodes, strict=True)) / count

    def spread(group):
        for node in nodes:
            for rank in node:
                p[rank] = p[node[group % len(node)]].clone()

    def merge(batch):
        group, sent, wait = flying
        n, w = len(nodes), 2 * wait
        mean = weighted_mean(members(group), sent)
        for rank in members(group):
            p[rank] = (w * p[rank] + n * mean) / (n + w)
        events.append((batch, "merge", group))
        spread(group)

    for batch in range(batches):
        local = gs == 0 or ls <= 1 or batch == last or batch % gs <= btw or batch % ls == 0
        local = local or len(nodes) == 1
        gradients = [slopes(rank, batch, size) for rank in range(count)]
        for node in nodes:
            mean = sum(gradients[rank] for rank in node) / len(node)
            for rank in node:
                p[rank] = p[rank] - lr * (mean if local else gradients[rank])
        if not groups:
            continue
        if batch == last or gs == 0 or (btw == 0 and batch % gs == 0):
            if flying is not None:
                merge(batch)
                flying = None
            events.append((batch, "send", turn))
            mean = weighted_mean(members(turn), [p[rank] for rank in members(turn)])
            for rank in members(turn):
                p[rank] = mean.clone()
            events.append((batch, "replace", turn))
            spread(turn)
            turn = (turn + 1) % groups
        elif batch % gs == 0:
            events.append((batch, "send", turn))
            sent = [p[rank].clone() for rank in members(turn)]
            if flying is not None:
                merge(batch)
            wait = min(btw, last - batch)
            flying, due = (turn, sent, wait), batch + wait
            turn = (turn + 1) % groups
        elif flying is not None and batch == due:
            merge(batch)
            flying = None
    return p, events
