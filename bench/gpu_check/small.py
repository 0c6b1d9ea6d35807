"""One small call of each kernel, for compute-sanitizer: `python -m bench.gpu_check.small [--cpu]`."""

from __future__ import annotations

import os
import sys

from bench.gpu_check.bare import quiet, stand_in
from bench.gpu_check.table import Setup, machine


def main(arguments: list[str]) -> int:
    """Run attention, the fused operations and the sampler on small inputs; return 1 if one is wrong."""
    setup = Setup(reduced="--cpu" in arguments, small=True)
    if setup.reduced:
        os.environ["TRITON_INTERPRET"] = "1"
    stand_in()
    quiet()
    from bench.gpu_check import kernels, sampling

    with machine(setup):
        lines = [*kernels.errors(setup), *sampling.sampler(setup)]
    wrong = [line for line in lines if line.result == "FAILED"]
    for line in wrong:
        print(f"{line.what}: {line.detail}")
    print(f"{len(lines)} checks, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
