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
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

V = 128_256
# the coupled methods for all generations; the others launch the same kernels, `token` here where the passes hold most
WANTED = (
    (("block", "univer", "traversal"), torch.bfloat16, False, (80, 90, 100)),
    (("token",), torch.float32, True, (90,)),
)
TREES = {"chain": (-1, 0, 1, 2, 3, 4), "tree": (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5)}


def launches(method: str, dtype: torch.dtype, cut: bool) -> list[tuple[JITFunction, dict]]:
    """(kernel, its arguments and options) of one call of `method`."""
    parents = TREES["chain" if method in ("token", "block") else "tree"]
    found = []

    def record(kernel, *args, grid, warmup, **options):
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | options))

    given, JITFunction.run = JITFunction.run, record
    try:
        rows = torch.empty(1, len(parents), V, dtype=dtype)
        tokens = torch.zeros(1, len(parents), dtype=torch.int64)
        cuts = (torch.empty(1, len(parents), 3),) * 2 if cut else None
        uniform = torch.zeros(1, 2, dtype=torch.float64)
        dispatch.KERNELS[method](Call(rows, rows, tokens, parents, torch.zeros(1, len(parents)), uniform, 0.7, cuts))
    finally:
        JITFunction.run = given
    return found


def compiled(kernel: JITFunction, arguments: dict, architecture: int) -> dict:
    """Registers, spills and shared memory of one kernel on sm_`architecture`."""
    # at run time an argument of 1 becomes a constant too, unless the kernel forbids it
    ones = {p.name for p in kernel.params if type(arguments[p.name]) is int and arguments[p.name] == 1}
    fixed = {p.name for p in kernel.params if p.is_constexpr or (p.name in ones and not p.do_not_specialize)}
    constants = {name: arguments[name] for name in fixed}
    signature = {p.name: "constexpr" if p.name in fixed else mangle_type(arguments[p.name]) for p in kernel.params}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, p in enumerate(kernel.params)
        if isinstance(arguments[p.name], torch.Tensor) or (p.name.endswith(("_b", "_n")))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": arguments["num_warps"]}
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    numbers = {"warps": arguments["num_warps"], "shared": binary.metadata.shared}
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


def main() -> None:
    done = set()
    for methods, dtype, cut, architectures in WANTED:
        for kernel, arguments in (launch for method in methods for launch in launches(method, dtype, cut)):
            constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
            row = {"kernel": f"{kernel.__module__.rsplit('.', 1)[-1]}.{kernel.__name__}", **constants}
            if "target" in arguments:
                row["dtype"] = str(dtype)
            if str(row) not in done:
                done.add(str(row))
                for architecture in architectures:
                    numbers = compiled(kernel, arguments, architecture)
                    print(json.dumps(row | {"sm": architecture} | numbers), flush=True)


if __name__ == "__main__":
    main()
