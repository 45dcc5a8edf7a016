"""Plans with targets: optimizers on the CPU, and stages of two targets."""

from __future__ import annotations

ADAM = "{type: adam, lr: 0.01, eps: 0.01}"
ON_CPU = "{type: adam, lr: 0.01, eps: 0.01, target: cpu}"
PLANS = {
    "one rank": "ranks: 1\ntarget: {'**': cuda, bend: cpu}\n",
    "placed": "ranks: 2\nplacement: {up: 0, bend: 0, down: 1, add: 1}\ntarget: {up: cuda, down: cuda}\n",
    "cut": "ranks: 2\nmesh: {tp: 2}\nsharding: {up: colwise, down: rowwise}\ntarget: cuda\n",
    "data": "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\ntarget: {bend: cpu, '{up,down}': cuda}\n",
}
PIPED = (
    "ranks: 2\nsymbols: {batch: {divisor: 16}}\nplacement: {up: 0, bend: 0, down: 1, add: 1}\n"
    "target: {up: cuda, down: cuda}\n"
)
