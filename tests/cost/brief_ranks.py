"""The ranks of `partc measure`, which measure briefly and no large sizes: a test reads what they find, not how fast it is."""

import runpy

from partc.cli.machine import kernels, links

if __name__ == "__main__":
    kernels._LONGEST /= 10
    kernels._WEIGHT = 256
    kernels.SIZES, kernels._CACHED, kernels._MEMORY = kernels.SIZES[:3], (1 << 21,), 1 << 22
    links.SIZES = links.SIZES[:-1]
    runpy.run_module("partc.cli.machine.ranks", run_name="__main__")
