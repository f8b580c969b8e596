"""Compiles every kernel that a method launches, for GPUs that this machine need not have; run as a script.

The launches are recorded on CPU tensors, nothing runs. Prints one JSON line a kernel and architecture.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from diversed.verifier.kernels import dispatch
from diversed.verifier.kernels.launch import Call
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

V = 128_256
# the coupled methods for all generations; the others launch the same kernels, `token` here where the passes hold most
WANTED = (
    (("block", "univer", "traversal"), torch.bfloat16, False, (80, 90, 100)),
    (("token",), torch.float32, True, (90,)),
)
TREES = {"chain": (-1, 0, 1, 2, 3, 4), "tree": (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5)}


class Elsewhere:
    """In the place of triton's driver: a GPU that this machine need not have. Nothing is launched on it."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


def launches(method: str, dtype: torch.dtype, cut: bool, batch: int = 1) -> list[tuple[JITFunction, tuple, dict]]:
    """(kernel, its arguments, its constants and options) of one call of `method`."""
    parents = TREES["chain" if method in ("token", "block") else "tree"]
    found = []

    def record(kernel, *arguments, grid, warmup, **options):
        found.append((kernel, arguments, options))

    given, JITFunction.run = JITFunction.run, record
    try:
        rows = torch.empty(batch, len(parents), V, dtype=dtype)
        tokens = torch.zeros(batch, len(parents), dtype=torch.int64)
        cuts = (torch.empty(batch, len(parents), 3),) * 2 if cut else None
        uniform = torch.zeros(batch, 2, dtype=torch.float64)
        dispatch.KERNELS[method](Call(rows, rows, tokens, parents, torch.zeros(batch, len(parents)), uniform, 0.7, cuts))
    finally:
        JITFunction.run = given
    return found


def compiled(kernel: JITFunction, arguments: tuple, options: dict, architecture: int) -> dict:
    """Registers, spills and shared memory of one kernel on sm_`architecture`, as a launch there would compile it."""
    driver.set_active(Elsewhere(architecture))
    binary = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    numbers = {"warps": options["num_warps"], "shared": binary.metadata.shared}
    return numbers | resources(binary.asm["cubin"])


def resources(cubin: bytes) -> dict:
    """Registers a thread, and bytes a thread has outside them: spills are there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said.stdout)
    return {"registers": int(found[1]), "spilled": int(found[2]) + int(found[3])}


def compiled_again(method: str) -> list[str]:
    """The kernels that a batch of 16 compiles although one of 1 was there."""
    driver.set_active(Elsewhere(90))
    found = []
    for once, more in zip(launches(method, torch.bfloat16, True), launches(method, torch.bfloat16, True, 16), strict=True):
        (kernel, arguments, options), (_, others, _) = once, more
        binder = kernel.device_caches[90][4]
        if binder(*arguments, **options)[1] != binder(*others, **options)[1]:
            found.append(kernel.__name__)
    return found


def main() -> None:
    for method in dispatch.KERNELS:
        print(json.dumps({"method": method, "compiled again": compiled_again(method)}))
    done = set()
    for methods, dtype, cut, architectures in WANTED:
        for kernel, arguments, options in (launch for method in methods for launch in launches(method, dtype, cut)):
            constants = {name: value for name, value in options.items() if name != "num_warps"}
            row = {"kernel": f"{kernel.__module__.rsplit('.', 1)[-1]}.{kernel.__name__}", **constants}
            if kernel.arg_names[0] == "models":
                row["dtype"] = str(dtype)
            if str(row) not in done:
                done.add(str(row))
                for architecture in architectures:
                    numbers = compiled(kernel, arguments, options, architecture)
                    print(json.dumps(row | {"sm": architecture} | numbers), flush=True)


if __name__ == "__main__":
    main()
