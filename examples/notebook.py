"""From a pair of models to a trained head that decodes, with the public names alone.

Everything here runs on the embedded pair in about a minute on one CPU core. The same cells work for
a pair of your own: give `load_pair` and `call` two folders or hub names.
"""

import sys
import tempfile

from diversed import (
    METHODS,
    HeadModule,
    HeadOptions,
    Sampling,
    TraceModule,
    TraceOptions,
    call,
    decode,
    load_bundle,
    load_pair,
)
from pytorch_lightning import Trainer

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()

# Load a pair, and decode with a method and a relaxation.
pair = load_pair("sums-target", "sums-draft")
question = "Last morning Daka had 42 eggs. Last Monday she sold 4. How many eggs are there now?\n"
prompts = [pair.tokenizer(question)["input_ids"]] * 4
sampling = Sampling(temperature=1.0)
for method in ("token", "block", "traversal"):
    for relaxation in ("none", "ensemble:0.4;blend=logits"):
        texts = decode(pair, prompts, method=method, relaxation=relaxation, sampling=sampling)
        calls = sum(text.target_calls for text in texts)
        tokens = sum(len(text.tokens) for text in texts)
        print(f"{method:10} {relaxation:26} {tokens / calls:.2f} tokens per target call")
assert method in METHODS

# Gather traces: what a head learns from.
call("gather", out=f"{folder}/traces", prompts=96, samples=4, relaxation="ensemble:0.3")

# Train a head with a Trainer of your own.
texts = TraceModule(TraceOptions(f"{folder}/traces", batch=16))
head = HeadModule(HeadOptions(objective="attribution", width=32, lr=3e-3))
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = Trainer(max_epochs=4, accelerator="cpu", **quiet)
trainer.fit(head, datamodule=texts)
print(f"step acceptance {trainer.callback_metrics['held_out_step_acceptance']:.3f}")

# Or let the command train it, export it as a bundle, and decode with the bundle.
trace_options = TraceOptions(f"{folder}/traces", batch=16)
call(
    "train",
    data=trace_options,
    out=f"{folder}/train",
    model=head.options,
    trainer={"max_epochs": 4},
)
call("export", train=f"{folder}/train", out=f"{folder}/bundle", bias=-3)
card = load_bundle(f"{folder}/bundle").card
text = decode(pair, prompts[:1], method="block", relaxation=f"{folder}/bundle")[0]
print(
    text.text,
    f"{text.tokens_per_target_call:.2f} tokens per target call",
    card["models"]["target"]["name"],
)
