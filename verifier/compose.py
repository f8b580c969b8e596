"""Vertical compositions: a plan for the children of one node becomes the law of a whole tree.

top_down(plan)      every level on its own: walk down, child j with probability P[j], stop with
                                            probability sum(r).
conditional(plan)   levels are coupled: the mass of a child is P[j] / (1 - sum of P[i] over earlier
                                        children); then,
                    children before their parent, each node fires with probability sum(r) / (sum(r)
                    + null), a leaf with its mass. The first node to fire is where the path ends.
                    (Sun 2025; Weng 2025, arXiv 2505.12398.)

The tree is walked level by level. Nodes of a level that have equally many children form a family
and go through the plan together; there is no loop over requests, nodes of a family or the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .law import DraftTree, Law
from .plans import Plan, Share, quotient
from .tree import on_device, topology


def top_down(plan: Plan, merge: bool = False) -> Callable[[DraftTree], Law]:
    """The law of walking down from the root; `merge` joins equal prefixes of K paths and keeps
    their multiplicity.
    """

    def law(tree: DraftTree) -> Law:
        walk = _walk(tree, plan, merge, coupled=False)
        reach = _column(tree)
        for family, accept in zip(walk.families, walk.accept, strict=True):
            mass = reach[:, family.nodes].unsqueeze(-1) * accept
            reach.scatter_add_(1, family.homes.expand_as(family.tokens).flatten(1), mass.flatten(1))
        return Law(stop=(reach * walk.emit)[:, :-1], next=walk.next)

    return law


def conditional(
    plan: Plan, merge: bool = False, ahead: Callable[[DraftTree], Tensor] | None = None
) -> Callable[[DraftTree], Law]:
    """The law of the first node to fire in post-order; `merge` joins equal prefixes of K paths.

    `ahead` gives the mass of every node [B, N] where it is known before any sum over V, as on a
    chain; the plan then sees all nodes in one call instead of one a level.
    """

    def law(tree: DraftTree) -> Law:
        walk = _walk(tree, plan, merge, coupled=True, known=ahead(tree) if ahead else None)
        # a node that keeps nothing gave all its mass to its children
        size = walk.emit + walk.null
        fire = torch.where(size > 0, walk.emit / size, 0)
        silent = torch.where(size > 0, walk.null / size, 1)
        before, after = torch.ones_like(fire), torch.ones_like(fire)
        for family in reversed(walk.families):
            quiet = _take(silent, family.children, family).prod(-1)
            after[:, family.nodes] = quiet
            silent[:, family.nodes] *= quiet
        for family in walk.families:
            earlier = _take(silent, family.children, family).cumprod(-1)
            earlier = torch.cat([torch.ones_like(earlier[..., :1]), earlier[..., :-1]], -1)
            mass = before[:, family.nodes].unsqueeze(-1) * earlier
            before.scatter_(1, family.children.expand_as(family.tokens).flatten(1), mass.flatten(1))
        return Law(stop=(before * fire * after)[:, :-1], next=walk.next)

    return law


@dataclass(frozen=True)
class Family:
    """n nodes of one level with M children each; node N stands for "no child here".

    ids:      n node numbers.
    nodes:    the same as an index, a slice where they are evenly spaced: a view instead of a copy
              of their rows.
    children: [B or 1, n, M] int64, in drawing order.
    homes:    like `children`, each child replaced by the first node with the same prefix.
    tokens:   [B, n, M] int64, -1 where absent.
    """

    ids: list[int]
    nodes: slice | list[int]
    children: Tensor
    homes: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class _Walk:
    """What the plans said: per family accept [B, n, M]; emit and null [B, N + 1]; next [B, N,
    V].
    """

    families: list[Family]
    accept: list[Tensor]
    emit: Tensor
    null: Tensor
    next: Tensor


def _walk(
    tree: DraftTree, plan: Plan, merge: bool, coupled: bool, known: Tensor | None = None
) -> _Walk:
    """One pass from the root down. `coupled` hands each node its own mass, otherwise every node is
    given 1.
    """
    shape = topology(tree.parents)
    branched = shape.split_paths if merge else None
    families = _merged(tree, *branched) if branched and branched[1] else _plain(tree)
    waits = coupled and known is None
    given = _column(tree)
    if not waits:
        given[:, :-1] = known if coupled else 1
    emit, null = torch.zeros_like(given), torch.zeros_like(given)
    rows = torch.empty_like(tree.target)
    accepts = []
    # with no mass to wait for, families of equal M go through the plan in one call: it costs 40
    # small operations
    for group in [[family] for family in families] if waits else _alike(families):
        family = _joined(group)
        mass = given[:, family.nodes]
        share = plan(tree.target[:, family.nodes], tree.draft[:, family.nodes], mass, family.tokens)
        share = (
            share
            if tree.pruned is None
            else _prune(share, tree.target[:, family.nodes], family, tree.pruned)
        )
        _normalise(share, tree.target, rows, family.nodes)
        emit[:, family.nodes], null[:, family.nodes] = share.emit, share.null
        accepts += share.accept.split([member.tokens.shape[1] for member in group], 1)
        if waits:
            # summed from the right: the share left to the later children is lost in 1 - sum over
            # the earlier ones
            later = share.accept.flip(-1).cumsum(-1).flip(-1) + (share.emit + share.null).unsqueeze(
                -1
            )
            mass = torch.where(later > 0, share.accept / later, 0)
            given.scatter_add_(1, family.homes.expand_as(family.tokens).flatten(1), mass.flatten(1))
    leaves = _span(list(shape.leaves))
    rows[:, leaves] = tree.target[:, leaves]
    emit[:, leaves], null[:, leaves] = given[:, leaves], 1 - given[:, leaves]
    return _Walk(families, accepts, emit, null, rows)


def _alike(families: list[Family]) -> list[list[Family]]:
    """Families in runs of equal M; together the runs keep their order."""
    runs: list[list[Family]] = []
    for family in families:
        if runs and runs[-1][0].tokens.shape[2] == family.tokens.shape[2]:
            runs[-1].append(family)
        else:
            runs.append([family])
    return runs


def _joined(families: list[Family]) -> Family:
    if len(families) == 1:
        return families[0]
    nodes = [node for family in families for node in family.ids]
    size = len(families[0].tokens)
    children = torch.cat([family.children.expand(size, -1, -1) for family in families], 1)
    homes = torch.cat([family.homes.expand(size, -1, -1) for family in families], 1)
    return Family(
        nodes, _span(nodes), children, homes, torch.cat([family.tokens for family in families], 1)
    )


def _normalise(share: Share, target: Tensor, rows: Tensor, nodes: slice | list[int]) -> None:
    """Write share.rest / share.total into our own `rows` at `nodes`, the target's row where that is
    0 / 0.
    """
    some = share.total > 0
    total = torch.where(some, share.total, 1).unsqueeze(-1)
    if not rows.is_cpu or torch.compiler.is_compiling():  # compiled, neither makes a copy
        rows[:, nodes] = torch.where(some.unsqueeze(-1), share.rest / total, target[:, nodes])
        return
    if isinstance(nodes, slice):
        torch.div(share.rest, total, out=rows[:, nodes])
    else:
        rows[:, nodes] = share.rest / total
    if not some.all():
        rows[:, nodes] = torch.where(some.unsqueeze(-1), rows[:, nodes], target[:, nodes])


def _prune(share: Share, target: Tensor, family: Family, pruned: Tensor) -> Share:
    """Emit the mass of pruned children at their parent, as their tokens: E[P + r] stays what it
    was, token by token.
    """
    known = torch.cat([pruned, torch.zeros_like(pruned[:, :1])], -1)
    moved = torch.where(_take(known, family.homes, family), share.accept, 0)
    rest = share.rest * quotient(share.emit, share.total).unsqueeze(-1)
    rest.addcmul_(target, torch.where(share.total > 0, 0, share.emit).unsqueeze(-1))
    rest.scatter_add_(-1, family.tokens.clamp(min=0), moved)
    emit = share.emit + moved.sum(-1)
    return Share(accept=share.accept - moved, emit=emit, null=share.null, rest=rest, total=emit)


def prefix_homes(tree: DraftTree, paths: tuple[tuple[int, ...], ...]) -> Tensor:
    """[B, K, L] int64: for every node of K paths the first path (0..K-1) that shares its prefix."""
    tokens = tree.tokens[:, on_device(paths, tree.tokens.device)]
    same = (tokens.unsqueeze(1) == tokens.unsqueeze(2)).cumprod(-1)
    return same.argmax(2)


def _merged(
    tree: DraftTree, trunk: tuple[int, ...], paths: tuple[tuple[int, ...], ...]
) -> list[Family]:
    """Families of K paths joined by prefix: below the branch, one family a level, its children
    differ by request.
    """
    size, device = len(tree.parents), tree.tokens.device
    homes = prefix_homes(tree, paths)
    grid = on_device(paths, device)
    families = [
        _family(tree, [node], ((child,),)) for node, child in zip(trunk, trunk[1:], strict=False)
    ]
    branch = _family(tree, [trunk[-1]], (tuple(path[0] for path in paths),))
    families.append(replace(branch, homes=grid[:, 0][homes[:, :, 0]].unsqueeze(1)))
    for level in range(1, len(paths[0])):
        mine = homes[:, None, :, level - 1] == torch.arange(len(paths), device=device)[:, None]
        mine = mine & (tree.tokens[:, grid[:, level]] >= 0).unsqueeze(1)
        order = (~mine).to(torch.uint8).argsort(dim=-1, stable=True)
        # the most children any node has; on a GPU and compiled the shape stays K, so that nothing
        # waits for the numbers
        looked_at = mine.is_cpu and mine.numel() and not torch.compiler.is_compiling()
        most = max(1, int(mine.sum(-1).max())) if looked_at else len(paths)
        order = order[..., :most]
        here = mine.gather(-1, order)
        children = torch.where(here, grid[:, level][order], size)
        home = grid[:, level][homes[:, :, level]].unsqueeze(1).expand_as(mine).gather(-1, order)
        tokens = tree.tokens[:, grid[:, level]].unsqueeze(1).expand_as(mine).gather(-1, order)
        ids = [path[level - 1] for path in paths]
        home, tokens = torch.where(here, home, size), torch.where(here, tokens, -1)
        families.append(Family(ids, _span(ids), children, home, tokens))
    return families


def _plain(tree: DraftTree) -> list[Family]:
    shape = topology(tree.parents)
    return [
        _family(tree, list(nodes), tuple(shape.children[node] for node in nodes))
        for nodes in shape.families
    ]


def _family(tree: DraftTree, nodes: list[int], children: tuple[tuple[int, ...], ...]) -> Family:
    where = on_device(children, tree.tokens.device)
    return Family(
        nodes, _span(nodes), where.unsqueeze(0), where.unsqueeze(0), tree.tokens[:, where]
    )


def _span(nodes: list[int]) -> slice | list[int]:
    """An index of `nodes`: a slice where they are evenly spaced."""
    step = nodes[1] - nodes[0] if len(nodes) > 1 else 1
    even = step > 0 and nodes == list(range(nodes[0], nodes[-1] + 1, step))
    return slice(nodes[0], nodes[-1] + 1, step) if even else nodes


def _column(tree: DraftTree) -> Tensor:
    """[B, N + 1] zeros with 1 at the root; the last column is "no child here"."""
    column = tree.target.new_zeros(len(tree.tokens), len(tree.parents) + 1)
    column[:, 0] = 1
    return column


def _take(column: Tensor, index: Tensor, family: Family) -> Tensor:
    """[B, n, M] entries of `column` [B, N + 1] at `index` [B or 1, n, M]."""
    return column.gather(1, index.expand_as(family.tokens).flatten(1)).view_as(family.tokens)
