"""Relaxed verification inside vLLM: a general plugin for its V2 model runner, written against vLLM
0.32.

    vllm serve TARGET --additional-config '{"diversed": "BUNDLE;bias=1"}' --speculative-config
        '{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic"}'

vLLM drafts and samples as it does; `ModelState.custom_sampler`, its hook for samplers from
elsewhere, is given a rejection sampler that relaxes the target's rows and verifies with our
kernels. `rejection_sample_method` chooses the
method: standard is token, block is block. The head may read the two rows alone (features logits):
vLLM keeps no hidden state of the draft. A configuration that names a relaxation and cannot have it
is refused before any model is loaded.

Every rank of a tensor-parallel group holds the same logits, and the random numbers are a pure
function of a request's seed and position; so the ranks agree without talking to each other.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..runtime.bundle import ROLES, Bundle, load_bundle
from ..runtime.model import load_tokenizer
from ..runtime.relaxer import Relaxer, bundle_relaxer, settled
from ..runtime.sampling import Sampling
from ..runtime.uniforms import uniforms
from ..verifier.law import DraftTree, Verdict, draw
from ..verifier.methods import METHODS
from ..verifier.relax import Believed, Relaxation, on_target, parse

KEY = "diversed"  # of vLLM's additional_config
METHOD = {"standard": "token", "block": "block"}
# Entries of a row of the vocabulary that are verified together: some twenty float32 copies of them
# exist at a time, 1.3 GB, which vLLM's memory profile does not know of.
AT_ONCE = 1 << 24
# Requests differ in their sampling. At temperature 0 the first of these stands for it, else the
# second: temperature, a filter and a grammar may have made other rows of what the models believe.
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(top_p=0.5)
logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point. vLLM calls it in every process, and then asks every configuration which
    model runner it takes: that is where a relaxation is looked for, checked and put in place.
    """
    from vllm.config import VllmConfig

    asked = getattr(VllmConfig, "use_v2_model_runner", None)
    if not isinstance(asked, property):
        logger.warning(
            "diversed: this version of vLLM has no V2 model runner, relaxations are not available"
            " in it"
        )
        return
    if asked.fget.__module__ == __name__:
        return

    def use_v2_model_runner(config) -> bool:
        chosen = asked.fget(config)
        if wanted(config) is not None:
            check(config, chosen)
            _install()
        return chosen

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)


def wanted(config) -> str | None:
    """The relaxation that a VllmConfig names, None where it names none."""
    return config.additional_config.get(KEY) if isinstance(config.additional_config, dict) else None


def check(config, v2: bool) -> None:
    """ValueError unless this VllmConfig can have the relaxation that it names."""
    asked, spec = f"additional_config {KEY!r}", config.speculative_config
    if not v2:
        raise ValueError(
            f"{asked} needs the V2 model runner, and vLLM chose V1 here; its log says why"
        )
    if spec is None or spec.method != "draft_model":
        came = "none" if spec is None else spec.method
        raise ValueError(
            f"{asked} relaxes towards a draft model, got speculative method {came}; give"
            " `draft_model`"
        )
    if spec.draft_sample_method != "probabilistic":
        raise ValueError(
            f"{asked} needs the draft's rows: set `draft_sample_method` probabilistic, got"
            f" {spec.draft_sample_method}"
        )
    if spec.rejection_sample_method not in METHOD:
        known = " or ".join(METHOD)
        raise ValueError(
            f"`rejection_sample_method` must be {known}, got {spec.rejection_sample_method}"
        )
    if not isinstance(wanted(config), str):
        raise ValueError(
            f"{asked} must be a relaxation, such as a bundle's folder, got {wanted(config)!r}"
        )
    rule, bundle = chosen(wanted(config))
    vocab = min(
        model.get_vocab_size() for model in (spec.target_model_config, spec.draft_model_config)
    )
    if bundle and bundle.card.vocab != vocab and not bundle.card.any_pair:
        raise ValueError(
            f"bundle {rule.source} is for a vocabulary of {bundle.card.vocab}, these models"
            f" share {vocab}"
        )


@lru_cache
def chosen(text: str) -> tuple[Relaxation, Bundle | None]:
    """The relaxation and its bundle, if it has one; ValueError if vLLM cannot have it."""
    rule = parse(text)
    if rule.budget is not None:
        raise ValueError(
            f"relaxation {text!r}: vLLM keeps no account of a text, so there is no budget; leave"
            " it out"
        )
    if rule.name != "learned":
        return rule, None
    bundle = load_bundle(rule.source)
    if bundle.head.needs_hidden:
        raise ValueError(
            f"the head of bundle {rule.source} reads hidden states, and vLLM keeps none of the"
            " draft; train one with features logits or logits+tokens"
        )
    rule = settled(rule, bundle)
    # A shard of a model has no fingerprint to compare with the card.
    names = map(bundle.card.name, ROLES)
    logger.warning(
        "diversed: %s was trained for target %s and draft %s; see that vLLM serves these",
        text,
        *names,
    )
    return rule, bundle


def _install() -> None:
    """Let vLLM's choice of a model state come back with our sampler where the configuration names a
    relaxation.
    """
    from vllm.v1.worker.gpu import model_states

    resolve = model_states.resolve_model_state_cls
    if resolve.__module__ == __name__:
        return

    def resolve_model_state_cls(vllm_config, model) -> type:
        state = resolve(vllm_config, model)
        return state if wanted(vllm_config) is None else relaxed_state(state)

    model_states.resolve_model_state_cls = resolve_model_state_cls


def relaxed_state(state: type) -> type:
    """The class of model states with our rejection sampler."""
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    if state.custom_sampler is not ModelState.custom_sampler:
        raise ValueError(
            f"{state.__name__} brings a sampler of its own, which additional_config {KEY!r} would"
            " replace"
        )

    def custom_sampler(self, sampler):
        config = self.vllm_config
        model = config.model_config
        tokenizer = partial(load_tokenizer, model.tokenizer, model.trust_remote_code)
        return sampler, relaxed_sampler()(
            sampler, config.speculative_config, self.device, wanted(config), tokenizer
        )

    return type(f"Relaxed{state.__name__}", (state,), {"custom_sampler": custom_sampler})


def relaxed_sampler() -> type:
    """vLLM's RejectionSampler with our `_verify`; refuses a version that would call it with
    something else.
    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    theirs, ours = (
        list(inspect.signature(cls._verify).parameters) for cls in (RejectionSampler, RelaxedVerify)
    )
    if theirs != ours:
        raise ValueError(
            f"this vLLM verifies {theirs}, the plugin was written for {ours}; install vllm 0.32"
        )
    return type("RelaxedRejectionSampler", (RelaxedVerify, RejectionSampler), {})


class RelaxedVerify:
    """Comes before vLLM's RejectionSampler in the order of resolution, and replaces its `_verify`;
    vLLM cuts a batch in chunks and makes log-probabilities as before.

    Of B requests each has up to L drafted tokens; N = L + 1 nodes, node 0 the last committed token.
    """

    def __init__(
        self,
        sampler,
        spec_config,
        device: torch.device,
        relaxation: str,
        tokenizer: Callable[[], Any] = lambda: None,
    ):
        super().__init__(sampler, spec_config, device)
        rule, bundle = chosen(relaxation)
        words = tokenizer() if bundle and bundle.head.needs_tokens else None
        self.greedy, self.sampled = (
            bundle_relaxer(rule, bundle, device, sampling, words)
            if bundle
            else Relaxer(rule, sampling=sampling)
            for sampling in (GREEDY, SAMPLED)
        )
        # Where the plugin was not loaded nothing else would tell.
        logger.warning("diversed: drafts are verified with the relaxation %s", relaxation)
        self.method = METHODS[METHOD[spec_config.rejection_sample_method]]
        self.kernel = self.method.kernel if device.type == "cuda" else None
        self.parents = tuple(range(-1, self.num_speculative_steps))

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(target's logits as sampled, tokens [B, N] int64, how many of them count [B] int32).

        logits:        [X, V] of the nodes of all requests, one request after the other.
        draft_logits:  [R, L, V] before temperature, in the order of vLLM's slots for requests.
        draft_sampled, pos: [X] token and position of every node; verify_draft_sampled has -1 at
            those not to be taken.
        cu_num_logits: [B + 1] first node of every request, and X.
        idx_mapping:   [B] slot of every request.
        """
        states = self.sampler.sampling_states
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        first = cu_num_logits[:-1].long().unsqueeze(1)
        node = torch.arange(len(self.parents), device=logits.device)
        here = first + node < cu_num_logits[1:].unsqueeze(1)
        at = torch.where(here, first + node, first)
        tokens = torch.where(here, verify_draft_sampled[at].long(), -1)
        # Nothing hangs below a token that is not to be taken.
        tokens = torch.where((tokens >= 0).cumprod(1) > 0, tokens, -1)
        slots = idx_mapping.long()
        coins = uniforms(states.seeds.gpu[slots], pos[first[:, 0]] + 1, 2)
        heat = states.temperature.gpu[slots]
        many = max(1, AT_ONCE // (logits.shape[-1] * len(self.parents)))
        parts = [
            self._block(
                processed[at[part]],
                logits[at[part]],
                draft_logits[slots[part]],
                tokens[part],
                heat[part],
                coins[part],
            )
            for part in torch.arange(len(slots), device=logits.device).split(many)
        ]
        sampled, count = (torch.cat(values) for values in zip(*parts, strict=True))
        # Whether a request without drafts comes here or to vLLM's plain sampler depends on what
        # others do; so that its seed gives one text, its token is the plain sampler's.
        plain = self._plain(processed[first[:, 0]], slots, pos[first[:, 0]])
        sampled[:, 0] = torch.where(tokens[:, 1] < 0, plain, sampled[:, 0])
        return processed, sampled, count

    def _plain(self, logits: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
        """[B] what vLLM's sampler draws from logits [B, V] as sampled, at positions [B]."""
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        states = self.sampler.sampling_states
        return gumbel_sample(
            logits,
            slots,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _block(
        self,
        target: Tensor,
        raw: Tensor,
        draft: Tensor,
        tokens: Tensor,
        heat: Tensor,
        coins: Tensor,
    ):
        """(tokens [B, N], how many of them count [B]) of one verification.

        target: [B, N, V] logits as sampled; raw: the model's own; draft: [B, L, V] before
            temperature; tokens: [B, N], -1 where absent.
        heat:   [B] temperatures; coins: [B, 2] uniforms.
        """
        target = target.float()
        drafted, rows = self._rows(target, raw.float(), draft, tokens, heat)
        if self.kernel:
            weight = torch.zeros(tokens.shape, device=tokens.device)  # the rows are relaxed already
            found = self.kernel(
                rows.log(), drafted.log(), tokens, self.parents, weight, coins
            ).verdict
        else:
            tree = DraftTree(tokens, self.parents, functional.pad(drafted, (0, 0, 0, 1)), rows)
            found = draw(self.method.law(tree), coins)
        return self._committed(tokens, found, target[:, 0])

    def _rows(
        self, target: Tensor, raw: Tensor, draft: Tensor, tokens: Tensor, heat: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The draft's rows [B, L, V], zero where no token was drawn from them, and the relaxed
        target's [B, N, V].

        The draft is drawn at the request's temperature alone. What top-k, a grammar or a list of
        forbidden tokens has taken from the target stays away from it: relaxing reads the draft's
        row without these tokens. At temperature 0 what the target believes has the request's
        penalties and biases in it, as its most likely token has.
        """
        greedy, child = (heat == 0)[:, None, None], tokens[:, 1:, None]
        drafted = (draft.float() / torch.where(greedy, 1, heat[:, None, None])).softmax(-1)
        # Cut or filled up to the target's vocabulary.
        missing = 0, target.shape[-1] - draft.shape[-1]
        drafted = functional.pad(drafted, missing)
        certain = torch.zeros_like(drafted).scatter_(-1, child.clamp_min(0), 1)
        drafted = torch.where(child < 0, 0, torch.where(greedy, certain, drafted))
        own = target.softmax(-1)
        best = torch.zeros_like(own).scatter_(-1, target.argmax(-1, keepdim=True), 1)
        own = torch.where(greedy, best, own)
        allowed = functional.pad((target[:, :-1] > -torch.inf).float(), (0, 0, 0, 1))
        leaf = 0, 0, 0, 1
        seen = on_target(allowed, functional.pad(drafted, leaf))
        tree = DraftTree(tokens, self.parents, seen, own)
        sure = functional.pad(functional.pad(draft.float().softmax(-1), missing), leaf)
        believed = Believed(
            torch.where(greedy, target, raw).softmax(-1),
            torch.where(greedy, on_target(allowed, sure), sure),
        )
        chosen, blended = (
            relaxer.tree(tree, believed=believed).target for relaxer in (self.greedy, self.sampled)
        )
        return drafted, torch.where(greedy, chosen, blended)

    def _committed(self, tokens: Tensor, found: Verdict, root: Tensor) -> tuple[Tensor, Tensor]:
        """The accepted tokens and the bonus token; root: [B, V] the target's logits at the root."""
        # Logits that are not numbers have no verdict. Like vLLM's own sampler take the largest of
        # the others: VLLM_COMPUTE_NANS_IN_LOGITS counts them, and one request's must not end all
        # others.
        accepted = found.node.clamp_min(0).unsqueeze(1)
        bonus = torch.where(found.node < 0, root.nan_to_num(nan=-torch.inf).argmax(-1), found.token)
        sampled = functional.pad(tokens[:, 1:], (0, 1)).scatter(1, accepted, bonus.unsqueeze(1))
        return sampled, accepted[:, 0].int() + 1
