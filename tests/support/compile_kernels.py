"""Compiles every kernel that a method launches, for GPUs that this machine need not have; run as a script.

The launches are recorded on CPU tensors, nothing runs. Prints one JSON line a kernel and architecture.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from diversed.verifier.kernels import run
from diversed.verifier.kernels.launch import Call
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

V = 128_256
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
        run.KERNELS[method](Call(rows, rows, tokens, parents, torch.zeros(1, len(parents)), uniform, 0.7, cuts))
    finally:
        JITFunction.run = given
    return found


def compiled(kernel: JITFunction, arguments: dict, architecture: int) -> dict:
    """Registers, spills and shared memory of one kernel on sm_`architecture`."""
    constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
    signature = {
        p.name: "constexpr" if p.is_constexpr else mangle_type(arguments[p.name]) for p in kernel.params
    }
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, p in enumerate(kernel.params)
        if isinstance(arguments[p.name], torch.Tensor) or (p.name.endswith(("_b", "_n")))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": arguments["num_warps"]}
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return {"shared": binary.metadata.shared} | assembled(binary.asm["ptx"], architecture)


def assembled(ptx: str, architecture: int) -> dict:
    """What ptxas says of the code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / ("ptxas-blackwell" if architecture > 99 else "ptxas")
    suffix = "a" if architecture >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool, "-v", f"--gpu-name=sm_{architecture}{suffix}", path, "-o", Path(folder) / "kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return {"registers": int(re.search(r"Used (\d+) registers", said)[1]), "spilled": spilled}


def main(methods: list[str]) -> None:
    done = set()
    for method in methods:
        for dtype, cut in ((torch.bfloat16, False), (torch.float16, True), (torch.float32, False)):
            for kernel, arguments in launches(method, dtype, cut):
                constants = tuple(arguments[p.name] for p in kernel.params if p.is_constexpr)
                name = f"{kernel.__module__.rsplit('.', 1)[-1]}.{kernel.__name__}"
                key = name, constants, str(arguments.get("target") is not None and dtype)
                for architecture in (80, 90, 100):
                    if (key, architecture) not in done:
                        done.add((key, architecture))
                        numbers = compiled(kernel, arguments, architecture)
                        row = {"kernel": name, "constants": str(constants), "dtype": str(dtype), "sm": architecture}
                        print(json.dumps(row | numbers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
