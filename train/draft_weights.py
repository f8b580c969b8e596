"""The weights of a draft that trains: a low-rank adapter, all of them, or layers of the target."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from ..files import within, write_whole
from ..runtime.forward import Model
from ..runtime.groups import Models
from ..runtime.model import load_module, load_tokenizer


@dataclass(frozen=True)
class Trained:
    """What of a draft is trained.

    Args:
        layers: start from these layers of the target instead of a draft, with its embeddings, last
            norm and output layer; the result is a model, not an adapter.
        full: train all weights of the draft, in float32, instead of a low-rank adapter.
        rank: of the adapter's matrices.
        alpha: the adapter's product is scaled by alpha / rank.
        modules: linear layers that are adapted, such as q_proj v_proj; by default all but the
            output layer.
    """

    layers: list[int] | None = None
    full: bool = False
    rank: int = 16
    alpha: float = 32.0
    modules: list[str] = field(default_factory=list)

    def __post_init__(self):
        within(1, rank=self.rank)
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"`alpha` must be a positive number, got {self.alpha}")
        layers = self.layers
        if layers is not None and not (layers and layers[0] >= 0 and layers == sorted(set(layers))):
            raise ValueError(
                f"`layers` must be numbers of the target's layers, from 0 and rising, got {layers}"
            )


class DraftWeights:
    """The module of a draft, with gradients for the weights that train.

    adapted: the same module with an adapter, as peft has it; None if all weights train.
    """

    def __init__(self, draft: Model, trained: Trained):
        self.module, self.trained = draft.module, trained
        self.place = draft.device, draft.dtype
        self.adapted: Any = None
        if trained.full:
            self.module.float().requires_grad_(True)
            return
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=trained.rank,
            lora_alpha=trained.alpha,
            target_modules=_chosen(linear_layers(self.module), trained.modules),
            task_type="CAUSAL_LM",
        )
        self.adapted = get_peft_model(self.module, config)

    @property
    def kind(self) -> str:
        """What is written: an adapter, or a whole model."""
        return "adapter" if self.adapted and not self.trained.layers else "model"

    def write(self, folder: Path, base: str, tokenizer: Any) -> list[str]:
        """Write the draft; names of its files. The module has plain weights then, where and as
        they were loaded.

        base: what an adapter is for.
        """
        names = write_adapter(folder, self.adapted, base) if self.kind == "adapter" else []
        if self.adapted:
            self.adapted.merge_and_unload()
        self.module.to(*self.place)
        return names or _save_model(folder, self.module, tokenizer)


def write_adapter(folder: Path, adapted: Any, base: str) -> list[str]:
    """Write an adapter as peft reads it; names of its files."""
    from peft import get_peft_model_state_dict

    config = adapted.peft_config["default"]
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    config.inference_mode = True
    weights = get_peft_model_state_dict(adapted).items()
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
    # peft writes its sets in an order that changes from process to process.
    described = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
    files = {
        "adapter_model.safetensors": save(tensors, metadata={"format": "pt"}),
        "adapter_config.json": described + "\n",
    }
    for name, content in files.items():
        write_whole(folder / name, content)
    return list(files)


def linear_layers(module) -> list[str]:
    """Names of the linear layers without the output layer; a name that repeats is there once."""
    from transformers.pytorch_utils import Conv1D

    output = module.get_output_embeddings()
    found = (
        name.rpartition(".")[2]
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not output
    )
    return sorted(set(found))


def _chosen(known: list[str], asked: list[str]) -> list[str]:
    if unknown := sorted(set(asked) - set(known)):
        raise ValueError(
            f"`modules` must name linear layers of the draft, {', '.join(known)}; got"
            f" {unknown[0]!r}"
        )
    return sorted(set(asked)) or known


def cut_draft(folder: Path, models: Models, layers: list[int]) -> str:
    """The folder with the draft that has these layers of the target; made if missing."""
    cut = folder / f"cut-{'-'.join(map(str, layers))}"
    if not cut.is_dir():
        part = folder / f".{cut.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        module = load_module(models.target, models.dtype, "cpu", models.trust_remote_code)
        keep_layers(module, layers).save_pretrained(part)
        load_tokenizer(models.target, models.trust_remote_code).save_pretrained(part)
        os.replace(part, cut)
    return str(cut)


def keep_layers(module, layers: list[int]) -> nn.Module:
    """A copy of a Hugging Face causal model that has only these of its layers."""
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    count = text.num_hidden_layers
    if layers[-1] >= count:
        raise ValueError(
            f"`layers` must name some of the target's layers 0..{count - 1}, got {layers[-1]}"
        )
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in layers]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    where = next(
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count
    )
    kept = {f"{where}.{layer}.": f"{where}.{new}." for new, layer in enumerate(layers)}
    draft, weights = type(module)(config).to(module.dtype), {}
    for name, value in module.state_dict().items():
        if not name.startswith(f"{where}."):
            weights[name] = value
        for old, new in kept.items():
            if name.startswith(old):
                weights[new + name.removeprefix(old)] = value
    draft.load_state_dict(weights)
    draft.generation_config = module.generation_config
    return draft.eval()


def _save_model(folder: Path, module, tokenizer) -> list[str]:
    """Save a model and its tokenizer into the folder, each file whole; their names."""
    part = folder / ".model.part"
    shutil.rmtree(part, ignore_errors=True)
    for tensor in module.parameters():
        tensor.data = (
            tensor.data.clone()
        )  # a lean forward had laid some side by side, in one storage
    module.save_pretrained(part)
    tokenizer.save_pretrained(part)
    names = sorted(path.name for path in part.iterdir())
    for name in names:
        os.replace(part / name, folder / name)
    part.rmdir()
    return names
