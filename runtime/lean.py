"""The forward pass of the Llama family without its modules: the same operations on the same
weights.

In a small model most time is overhead: one layer through transformers takes 1 ms at batch 1, of
which arithmetic is 0.1 ms. Here a layer is a dozen tensor operations.

The weights are the module's own. The weights of q, k and v are joined into one tensor, and so are
those of gate and up. On a CPU the tensor is stored by columns. The module's parameters become views
of it. So nothing is stored twice, and the module computes what it did before.

`obstacle(module)` says why a module must go through transformers. A module without an obstacle is
computed here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from .cache import PackedCache

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
# Frequencies of these types never depend on the text's length; those of `dynamic` and `longrope`
# do.
STEADY_ROPE = ("default", "linear", "llama3", "yarn")
SWITCH = "DIVERSED_LEAN"
# Hooks that transformers leaves on a module once it was asked for hidden states; they change
# nothing.
CAPTURING = "transformers.utils.output_capturing"
# Up to so many bytes a CPU's matrices are laid out by columns, [in, out]. By rows, MKL copies the
# whole matrix for a product with 2 to 6 rows. Float32, one EPYC core, times of 1, 2, 3, 4, 6 rows
# over those by rows: 128 x 512 .78 .61 .65 .74 .58; 128 x 128 .84 .82 .82 .81 .73; 256 x 128 1.09
# .88 .81 .71 .70; 576 x 3072 (7 MB) .67 .47 .46 1.09 1.04; but 576 x 49152 .58 .49 .51 1.43 1.30.
BY_COLUMNS = 8 << 20


def obstacle(module) -> str:
    """Why transformers must run this Hugging Face module, empty where `LeanForward` computes the
    same.
    """
    kind = getattr(module.config, "model_type", None)
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0"
    if kind not in FAMILY or not type(module).__name__.endswith("ForCausalLM"):
        return f"{type(module).__name__} is not of the Llama family"
    home = f"transformers.models.{kind}.modeling_{kind}"
    known = (
        nn.Linear,
        nn.Embedding,
        nn.ModuleList,
        nn.SiLU,
        type(module.model.layers[0].mlp.act_fn),
    )
    for part in module.modules():
        if type(part) not in known and type(part).__module__ != home:
            return f"it contains a {type(part).__name__}: quantised, adapted or changed"
        # An own `forward` is how accelerate hooks a module that it moves between devices.
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        if any(
            getattr(hook, "__module__", None) != CAPTURING for hook in hooks
        ) or "forward" in vars(part):
            return f"a hook on its {type(part).__name__}"
    tensors = list(module.parameters())
    if (
        len({(tensor.device, tensor.dtype) for tensor in tensors}) > 1
        or not tensors[0].is_floating_point()
    ):
        return "its weights lie on several devices or have several types"
    rotary = module.model.rotary_emb
    if rotary.rope_type not in STEADY_ROPE:
        return f"rope type {rotary.rope_type}"
    if 2 * rotary.inv_freq.numel() != module.model.layers[0].self_attn.head_dim:
        return "its positions rotate a part of each head"
    if module.config.hidden_act != "silu":
        return f"activation {module.config.hidden_act}"
    return ""


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, transposed views [in, out]; norms are [H], biases None where there are
    none.

    kind: of its attention, a key of the masks.
    """

    kind: str
    before: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    after: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class LeanForward:
    """Runs a module without an `obstacle`, no gradients; its parameters' storage may change, their
    values do not.
    """

    def __init__(self, module):
        self.module, config, attention = module, module.config, module.model.layers[0].self_attn
        self.size, self.scale, self.epsilon = (
            attention.head_dim,
            attention.scaling,
            config.rms_norm_eps,
        )
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        self.probes = [
            part._parameters for part in (attention.q_proj, module.model.layers[0].mlp.gate_proj)
        ]
        module.register_state_dict_post_hook(_by_rows)
        self._collect()

    def _collect(self) -> None:
        """Lay out the module's weights."""
        module, config = self.module, self.module.config
        window = getattr(config, "sliding_window", None)
        default = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or default
        self.layers = [
            _layer(layer, kind) for layer, kind in zip(module.model.layers, kinds, strict=True)
        ]
        self.norm = module.model.norm.weight.detach()
        self.head, self.head_bias = (
            _side_by_side([module.lm_head.weight]),
            _end_to_end([module.lm_head.bias]),
        )
        self.embedding = module.model.embed_tokens.weight.detach()  # which may be the head's
        self.where = self._address()
        self.angles = self.embedding.new_empty(0, 2 * self.size)

    def refresh(self) -> None:
        """Collect the weights again where the module's have been moved or cast since."""
        if self._address() != self.where:
            self._collect()

    def _address(self) -> tuple[int, ...]:
        """Changes when the module's weights are moved or cast: what is collected here is then out
        of date.
        """
        return tuple(parameters["weight"].data_ptr() for parameters in self.probes)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        masks: dict[str, Tensor | None],
        cache: PackedCache | None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, Q, V] and hidden states [B, Q, H] after the final norm; of the last token
        alone if `last_only`.

        tokens, positions: [B, Q] int64; no positions where they are the numbers of the slots.
        masks: for each kind of attention [B or 1, 1, Q, slots] to add to the scores, None where
            every slot is seen.
        cache: of one layer, whose heads are those of all layers side by side.
        """
        batch, count = tokens.shape
        rotation = self._rotation(positions, count, cache)
        past = self._slots(cache, batch, count)
        # Queries that share keys and values become one of several rows: free where there is one
        # token, and 3 to 6 times as fast in bfloat16 (batch 1 and 16, 256 slots, 3 x 3 heads of
        # 64). On a GPU the fast kernels take a mask only without grouped heads.
        fold = self.heads > self.shared and (count == 1 or not tokens.is_cpu)
        if fold:
            groups = self.heads // self.shared
            masks = {
                kind: mask if mask is None else mask.repeat(1, 1, groups, 1)
                for kind, mask in masks.items()
            }
        x = functional.embedding(tokens, self.embedding).view(batch * count, -1)
        for layer, slots in zip(self.layers, past, strict=True):
            seen = self._attention(
                layer, _rms_norm(x, layer.before, self.epsilon), rotation, slots, masks, fold
            )
            x = _add_product(x, seen, layer.out, layer.out_bias)
            wide = _product(
                _rms_norm(x, layer.after, self.epsilon), layer.gate_up, layer.gate_up_bias
            )
            gate, up = wide.chunk(2, -1)
            x = _add_product(x, functional.silu(gate).mul_(up), layer.down, layer.down_bias)
        if last_only:
            x, count = x.view(batch, count, -1)[:, -1], 1
        hidden = _rms_norm(x, self.norm, self.epsilon)
        logits = _product(hidden, self.head, self.head_bias)
        return logits.view(batch, count, -1), hidden.view(batch, count, -1)

    def _attention(self, layer: _Layer, x: Tensor, rotation, slots, masks, fold: bool) -> Tensor:
        """What each token of x [B * Q, H] sees, [B * Q, heads * size]; its keys and values go into
        its slots.
        """
        cos, sin = rotation
        count = cos.shape[-2]
        batch = len(x) // count
        # [B, heads of q, k and v, Q, size], of which q and k are turned in place
        every = (
            _product(x, layer.qkv, layer.qkv_bias).view(batch, count, -1, self.size).transpose(1, 2)
        )
        query, turned = every.narrow(1, 0, self.heads), every.narrow(1, 0, self.heads + self.shared)
        if layer.q_norm is not None:
            key = every.narrow(1, self.heads, self.shared)
            query.copy_(_rms_norm(query, layer.q_norm, self.epsilon))
            key.copy_(_rms_norm(key, layer.k_norm, self.epsilon))
        swapped = turned.roll(self.size // 2, -1)
        turned.mul_(cos).addcmul_(swapped, sin)
        fresh, key, value = slots
        if fresh is None:
            key, value = every.narrow(1, self.heads, 2 * self.shared).chunk(2, 1)
        else:
            fresh(every.narrow(1, self.heads, 2 * self.shared))
        mask = masks[layer.kind]
        # The fused attention is taken always. Measured on an EPYC core, torch 2.13, a mask, 64 and
        # 512 slots, heads of 16 to 64, 1 to 6 tokens: softmax and products written out take 1.1 to
        # 4 times as long at batch 1 and 0.7 to 1.6 times at batch 64 in float32; 0.7 to 4 times
        # with one token and up to 20 times with six in bfloat16. Leaving out the mask saves about a
        # tenth.
        if not fold:
            seen = functional.scaled_dot_product_attention(
                query, key, value, mask, scale=self.scale, enable_gqa=self.heads > self.shared
            )
            return seen.transpose(1, 2).reshape(batch * count, -1)
        query = query.reshape(batch, self.shared, -1, self.size)  # [B, shared, groups * Q, size]
        seen = functional.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        return (
            seen.view(batch, self.heads, count, self.size)
            .transpose(1, 2)
            .reshape(batch * count, -1)
        )

    def _rotation(
        self, positions: Tensor | None, count: int, cache: PackedCache | None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [(B, 1,) Q, size] at the positions, sin with the sign of the half that it is
        multiplied with.

        A token's slot is never before its position, so a cache's capacity bounds the positions
        without reading them.
        """
        if cache is None:
            found = self._turned(positions.flatten())
        else:
            if self.angles.shape[0] < cache.capacity:
                self.angles = self._turned(torch.arange(cache.capacity, device=self.angles.device))
            if positions is None:
                return self.angles.narrow(0, cache.layers[0].slots, count).chunk(2, -1)
            found = functional.embedding(positions, self.angles)
        return found.view(-1, 1, count, 2 * self.size).chunk(2, -1)

    def _turned(self, positions: Tensor) -> Tensor:
        """[X, 2 * size] cos and signed sin of the angles at positions [X], computed in float32 as
        the module does.
        """
        rotary = self.module.model.rotary_emb
        angle = positions.unsqueeze(-1).float() * rotary.inv_freq.to(
            positions.device, torch.float32
        )
        cos, sin = angle.cos() * rotary.attention_scaling, angle.sin() * rotary.attention_scaling
        return torch.cat((cos, cos, -sin, sin), -1).to(self.embedding.dtype)

    def _slots(self, cache: PackedCache | None, batch: int, count: int):
        """For every layer: what writes its keys and values, [B, 2 * shared, Q, size], into their
        slots, and all keys and all values up to there, [B, shared, slots, size] each; all of them
        where rows write at slots of their own.
        """
        if cache is None:
            return [(None, None, None)] * len(self.layers)
        store, both = cache.layers[0], 2 * self.shared
        if not store.is_initialized:
            # One buffer holds both, so that a layer writes once and a step moves once.
            states = self.embedding.new_empty(batch, len(self.layers) * both, 1, self.size)
            store.lazy_initialization(states, states[:, :0])
        seen = store.keys
        if isinstance(store.slots, Tensor):
            # One operation on the whole buffer: compiled, one on a view of it would copy all of it.
            rows = torch.arange(batch, device=store.keys.device)[:, None, None]
            heads = torch.arange(store.keys.shape[1], device=store.keys.device)[:, None].split(both)
            slots = store.slots.unsqueeze(1)
            writes = [partial(store.keys.index_put_, (rows, layer, slots)) for layer in heads]
        else:
            writes = [layer.copy_ for layer in seen.narrow(2, store.slots, count).split(both, 1)]
        if store.end < store.capacity:
            seen = seen.narrow(2, 0, store.end)
        seen = seen.split(self.shared, 1)
        return zip(writes, seen[::2], seen[1::2], strict=True)


def _layer(layer, kind: str) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (norm.weight.detach() if norm is not None else None for norm in norms)
    return _Layer(
        kind,
        layer.input_layernorm.weight.detach(),
        _side_by_side([part.weight for part in qkv]),
        _end_to_end([part.bias for part in qkv]),
        q_norm,
        k_norm,
        _side_by_side([attention.o_proj.weight]),
        _end_to_end([attention.o_proj.bias]),
        layer.post_attention_layernorm.weight.detach(),
        _side_by_side([mlp.gate_proj.weight, mlp.up_proj.weight]),
        _end_to_end([mlp.gate_proj.bias, mlp.up_proj.bias]),
        _side_by_side([mlp.down_proj.weight]),
        _end_to_end([mlp.down_proj.bias]),
    )


def _side_by_side(weights: list[Tensor]) -> Tensor:
    """[in, out] of all weights [out, in], which become views of it."""
    size = sum(weight.nbytes for weight in weights)
    columns = (
        weights[0].is_cpu
        and weights[0].dtype in (torch.float32, torch.float64)
        and size <= BY_COLUMNS
    )
    return _end_to_end(weights, columns).t()


def _end_to_end(parameters: list[Tensor | None], columns: bool = False) -> Tensor | None:
    """One tensor of all rows, laid out by columns if asked to, in which the parameters become
    views; found again where they are that already.
    """
    first = parameters[0]
    if first is None or (len(parameters) == 1 and not columns):
        return first if first is None else first.detach()
    rows = sum(len(parameter) for parameter in parameters)
    shape = (rows, *first.shape[1:])
    strides = (1, rows) if columns else first.detach().contiguous().stride()
    home, starts = (
        first.untyped_storage().data_ptr(),
        accumulate(map(len, parameters[:-1]), initial=0),
    )
    # Two allocations may touch by chance; one storage that holds all rows is ours.
    if all(
        parameter.untyped_storage().data_ptr() == home
        and parameter.storage_offset() == first.storage_offset() + start * strides[0]
        and parameter.stride() == strides
        for parameter, start in zip(parameters, starts, strict=True)
    ):
        return first.detach().as_strided(shape, strides)
    with torch.inference_mode(False):  # the module may be trained later
        joined = torch.cat([parameter.detach() for parameter in parameters])
        joined = joined.t().contiguous().t() if columns else joined
    for parameter, part in zip(
        parameters, joined.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = part
    return joined


def _by_rows(module, state: dict[str, Tensor], prefix: str, local_metadata: dict) -> None:
    """Leave copies by rows where `state` has values by columns, as everything expects that writes
    them to a file.
    """
    copies = {}
    for name, value in state.items():
        if (
            name.startswith(prefix)
            and not isinstance(value, nn.Parameter)
            and not value.is_contiguous()
        ):
            key = value.data_ptr(), value.shape  # tied weights stay tied
            state[name] = copies.setdefault(key, value.contiguous())


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    total = torch.addmm(residual, x, weight)
    return total if bias is None else total + bias


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean x^2 + epsilon) [..., H], in float32 and rounded before the weight, as
    the modules do.

    On a CPU torch's own rms_norm is seven operations and rounds after the weight.
    """
    if not x.is_cpu:
        return functional.rms_norm(x, x.shape[-1:], weight, epsilon)
    size, wide = x.shape[-1], torch.float64 if x.dtype is torch.float64 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    least, zero = _constants(size, epsilon)
    unit = torch.addcdiv(zero, x, torch.hypot(length, least), value=size**0.5)
    return (unit if wide is x.dtype else unit.to(x.dtype)) * weight


@lru_cache
def _constants(size: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """The length of a vector whose mean square is epsilon, and nothing."""
    with torch.inference_mode(False):
        return torch.tensor((size * epsilon) ** 0.5), torch.zeros(())
