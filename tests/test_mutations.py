"""Plausible mistakes, each made in a copy of the verifier: a law must catch every one of them.

Most are mistakes of public code or traps the papers warn of. A change of the source that moves one of these places
must move it here too: the edit looks for its text and fails when it is gone.
"""

import pytest

from .support.mutants import first_broken_law, forget, verifier_with

MISTAKES = {
    "block verification emits the token-level residual": [
        ("plans", "    residual = target * mass.unsqueeze(-1)\n", "    residual = target.clone()\n"),
    ],
    "the first failure ends the path instead of the last success": [
        ("compose", "            silent[:, family.nodes] *= quiet\n", ""),
        (
            "compose",
            "            mass = before[:, family.nodes].unsqueeze(-1) * earlier\n",
            "            mass = before[:, family.nodes].unsqueeze(-1) * _take(fire, family.children, family)\n",
        ),
        ("compose", "(before * fire * after)", "(before * after)"),
    ],
    "parents fire before their children": [
        (
            "compose",
            "            mass = before[:, family.nodes].unsqueeze(-1) * earlier\n",
            "            mass = (before * (1 - fire))[:, family.nodes].unsqueeze(-1) * earlier\n",
        ),
        ("compose", "(before * fire * after)", "(before * fire)"),
    ],
    "a child's mass is not divided by what its elder siblings left": [
        ("compose", "torch.where(later > 0, share.accept / later, 0)", "share.accept"),
    ],
    "the sampled child is visited first": [
        ("compose", "share.accept.flip(-1).cumsum(-1).flip(-1)", "share.accept.cumsum(-1)"),
    ],
    "the draft's row does not shrink after a sibling": [
        (
            "plans",
            "return _recursive(target, draft, mass, tokens, shrink=True)",
            "return with_replacement(target, draft, mass, tokens)",
        ),
    ],
    "the shrunken row is not renormalised": [
        ("plans", "left + (proposal * firsts).sum(-1)", "torch.ones_like(mass)"),
    ],
    "a duplicate is taken for a second draw without replacement": [
        ("plans", "proposal = torch.where(tokens == token, 0, proposal)", "pass"),
    ],
    "a duplicate is not accepted but still takes the draft's row from the residual": [
        ("plans", "present = (token[..., 0] >= 0) & (proposal[..., child] > 0)", "present = token[..., 0] >= 0"),
    ],
    "null is not renormalised with the residual": [
        ("plans", "alpha, null = quotient(alpha, size), quotient(null, size)", "alpha = quotient(alpha, size)"),
    ],
    "the residual's mass forgets the children": [
        ("plans", "total = residual.sum(-1) + (wanted * firsts).sum(-1)", "total = residual.sum(-1)"),
    ],
    "the greedy plan compares with the whole draft row": [
        ("plans", "    _clear(residual, fixed)\n", ""),
    ],
    "the rest of the draft is taken as one minus the fixed children": [
        ("plans", "    left = residual.sum(-1)\n", "    left = 1 - _at(draft, fixed).sum(-1)\n"),
    ],
    "a pruned sampled child is treated as never sampled": [
        (
            "compose",
            "where.unsqueeze(0), where.unsqueeze(0), tree.tokens[:, where]\n    )",
            "where.unsqueeze(0), where.unsqueeze(0), _kept(tree)[:, where]\n    )\n\n\n"
            "def _kept(tree):\n"
            "    return tree.tokens if tree.pruned is None else tree.tokens.masked_fill(tree.pruned, -1)",
        ),
    ],
    "a pruned child's mass is lost": [
        ("compose", "    rest.scatter_add_(-1, family.tokens.clamp(min=0), moved)\n", ""),
    ],
    "K-SEQ accepts at rho = 1": [
        (
            "plans",
            "low, high = torch.ones_like(mass), count.clamp(min=1)",
            "low, high = torch.ones_like(mass), torch.ones_like(mass)",
        ),
    ],
    "K-SEQ counts the children a node has room for": [
        ("plans", "count = (tokens >= 0).sum(-1).to(draft.dtype)", "count = torch.full_like(mass, tokens.shape[-1])"),
    ],
    "the trunk's child is duplicated once a path": [
        ("compose", "_family(tree, [node], ((child,),)) for", "_family(tree, [node], ((child,) * len(paths),)) for"),
    ],
    "prefixes are compared by their last token alone": [
        ("compose", "tokens.unsqueeze(2)).cumprod(-1)", "tokens.unsqueeze(2)).long()"),
    ],
    "GBV breaks ratio ties by the order of the paths": [
        (
            "multipath",
            "token = torch.where(best, tokens, -2).amax(-1, keepdim=True)",
            "token = tokens.gather(1, best.long().argmax(-1, True))",
        ),
    ],
    "GBV clamps the ratio when it selects": [
        (
            "multipath",
            "ratio = ratios(tree.target[rows], tree.draft[rows])",
            "ratio = ratios(tree.target[rows], tree.draft[rows]).clamp(max=1)",
        ),
    ],
    "GBV verifies with the draft's row instead of the selected path's": [
        (
            "multipath",
            "draft = torch.cat([draft[:, :branch], below], 1)",
            "draft = torch.cat([draft[:, :branch], draft[:, branch:]], 1)",
        ),
    ],
    "GBV starts theta anew at every level": [
        ("multipath", "theta = torch.where(v > 0, u / v, 0)", "theta = torch.zeros_like(theta)"),
    ],
    "GBV treats the trunk as if K paths had been drawn there": [
        ("multipath", "branch = len(trunk) - 1", "branch = 0"),
    ],
    "GBV ranks by descending ratio but selects the largest": [
        (
            "multipath",
            "argsort(dim=-1, stable=True)\n    ranked = draft[:, :-1]",
            "argsort(dim=-1, stable=True, descending=True)\n    ranked = draft[:, :-1]",
        ),
    ],
    "a leaf is relaxed though its draft was not run": [
        ("relax", "drafted = draft.amax(-1) > 0", "drafted = torch.ones_like(tree.tokens, dtype=torch.bool)"),
    ],
    "a node takes the weight of its neighbour": [
        ("relax", "share = weight.to(tree.target.dtype)", "share = weight.roll(1, 1).to(tree.target.dtype)"),
    ],
    "the weight is the target's share": [
        (
            "relax",
            "    share = torch.where(drafted, share, 0)\n",
            "    share = torch.where(drafted, 1 - share, 0)\n",
        ),
    ],
    "the lenient rule keeps what plain verification keeps": [
        ("rules", "kept = torch.minimum(draft, target / leniency)", "kept = torch.minimum(draft, target)"),
    ],
    "a rule's own rows decide in place of the believed ones": [
        ("rules", "taken = takes_draft(believed_target, believed_draft, *parameters)", "taken = takes_draft(target, draft, *parameters)"),
    ],
    "a rule's accepted tokens are those of the rows as sampled": [
        ("rules", "accepted = accepts(believed_target, believed_draft, *parameters)", "accepted = accepts(target, draft, *parameters)"),
    ],
    "the divergence is measured from the draft to the target": [
        ("rules", "((target * logs).sum(-1) <= threshold)", "((draft * -logs).sum(-1) <= threshold)"),
    ],
    "a sure target is relaxed": [("rules", " & (target.amax(-1) <= sure)", "")],
    "a mentored row has no floor": [("rules", "torch.maximum(most, floor * target)", "most + 0 * floor")],
    "a mentored row counts the tokens above its floor": [
        ("rules", "(ratio * below + above < 1)", "(ratio * below + above <= 2)"),
    ],
    "the regret's excess is taken out of every token alike": [
        ("rules", "share * (target - draft).clamp_min_(0)", "share * target"),
    ],
    "the regret is that of the draft": [
        ("rules", "math.exp(-threshold) * target.amax(-1, keepdim=True)", "math.exp(-threshold) * draft.amax(-1, keepdim=True)"),
    ],
    "top-p drops the token that reaches the mass": [
        ("rules", "ordered.cumsum(-1) - ordered < mass", "ordered.cumsum(-1) < mass"),
    ],
    "the greedy form asks about the target's token": [
        ("rules", "        wanted = draft.argmax(-1)\n", "        wanted = target.argmax(-1)\n"),
    ],
    "the greedy form of a chosen row takes the other row's token": [
        ("rules", "torch.where(taken, draft.argmax(-1), target.argmax(-1))", "torch.where(taken, target.argmax(-1), draft.argmax(-1))"),
    ],
    "the greedy form of a blend is the draft's token": [
        ("rules", "torch.lerp(target, draft, weight).argmax(-1)", "draft.argmax(-1)"),
    ],
    "the greedy form of a blend of logits is that of probabilities": [
        ("rules", "    return logs.argmax(-1)", "    return torch.lerp(target, draft, weight).argmax(-1)"),
    ],
    "a refused token is replaced by the highest of a tie": [
        ("rules", "torch.where(accepted.squeeze(-1), wanted, target.argmax(-1))",
         "torch.where(accepted.squeeze(-1), wanted, target.shape[-1] - 1 - target.flip(-1).argmax(-1))"),
    ],
    "the draft's token is the highest of a tie": [
        ("rules", "        wanted = draft.argmax(-1)\n", "        wanted = draft.shape[-1] - 1 - draft.flip(-1).argmax(-1)\n"),
    ],
    "the token of a blend is the highest of a tie": [
        ("rules", "torch.lerp(target, draft, weight).argmax(-1)",
         "target.shape[-1] - 1 - torch.lerp(target, draft, weight).flip(-1).argmax(-1)"),
    ],
    "the budget is charged once a block": [
        ("relax", "wanted = used[:, above] + cost[:, nodes]", "wanted = start.unsqueeze(-1) + cost[:, nodes]"),
    ],
    "the budget forgets what earlier blocks spent": [
        (
            "relax",
            "start = torch.zeros_like(cost[:, 0]) if spent is None else spent.to(cost)",
            "start = torch.zeros_like(cost[:, 0])",
        ),
    ],
    "at temperature 0 a blend is that of the rows as sampled": [
        (
            "relax",
            "chosen = token(believed.target, believed.draft, share.unsqueeze(-1))",
            "chosen = token(tree.target, tree.draft, share.unsqueeze(-1))",
        ),
    ],
    "at temperature 0 a blend takes the most likely token of the target": [
        (
            "relax",
            "chosen = token(believed.target, believed.draft, share.unsqueeze(-1))",
            "chosen = token(believed.target, believed.target, share.unsqueeze(-1))",
        ),
    ],
    "at temperature 0 a blend is drawn from": [
        ("relax", 'if greedy and rule.name != "coin" and rule.blend != "choice":', "if False:"),
    ],
    "at temperature 0 the coin is not thrown": [
        ("relax", 'if greedy and rule.name != "coin" and rule', "if greedy and rule"),
    ],
    "a rule judges by the rows as sampled": [
        (
            "relax",
            "judged = believed.target.to(wide), believed.draft.to(wide)",
            "judged = target.to(wide), draft.to(wide)",
        ),
    ],
    "a rule's token is the most likely one of the other row": [
        (
            "rules",
            "return torch.where(accepted.squeeze(-1), wanted, target.argmax(-1))",
            "return torch.where(accepted.squeeze(-1), target.argmax(-1), wanted)",
        ),
    ],
    "a tie of a blend goes to the highest id": [
        (
            "rules",
            "return torch.lerp(target, draft, weight).argmax(-1)",
            "return target.shape[-1] - 1 - torch.lerp(target, draft, weight).flip(-1).argmax(-1)",
        ),
    ],
    "a tie of the draft's tokens goes to the highest id": [
        (
            "rules",
            "        wanted = draft.argmax(-1)\n",
            "        wanted = draft.shape[-1] - 1 - draft.flip(-1).argmax(-1)\n",
        ),
    ],
    "a choice takes the target where the weight is large": [
        ("relax", "share = (share > 0.5)", "share = (share < 0.5)"),
    ],
    "the filter is applied after the blend": [
        (
            "relax",
            "draft = on_target(tree.target, tree.draft) if filtered else tree.draft",
            "draft = tree.draft",
        ),
        (
            "relax",
            "return replace(tree, target=torch.lerp(tree.target, draft, share.unsqueeze(-1)))",
            "rows = torch.lerp(tree.target, draft, share.unsqueeze(-1))\n"
            "    return replace(tree, target=unit(rows * (tree.target > 0)))",
        ),
    ],
    "a token that was filtered out comes back by the draft": [
        (
            "relax",
            "draft = on_target(tree.target, tree.draft) if filtered else tree.draft",
            "draft = tree.draft",
        ),
    ],
    "a token that was filtered out comes back by a logarithm": [
        ("relax", "rows = unit(rows * (tree.target > 0))", "pass"),
    ],
    "what is left of the draft's row is not renormalised": [
        ("relax", "return unit(draft * (target > 0))", "return draft * (target > 0)"),
    ],
    "a row of which the filter left nothing is blended": [
        ("relax", "drafted = draft.amax(-1) > 0", "drafted = tree.draft.amax(-1) > 0"),
    ],
}


def test_the_verifier_without_a_mistake_keeps_every_law(tmp_path):
    assert first_broken_law(verifier_with([], tmp_path, "no_mistake")) is None
    forget("no_mistake")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_breaks_a_law(mistake, tmp_path):
    name = f"mutant_{list(MISTAKES).index(mistake)}"
    try:
        assert first_broken_law(verifier_with(MISTAKES[mistake], tmp_path, name)) is not None
    finally:
        forget(name)
