"""ONNX's own multi-device annotations: a model with such annotations compiles without a plan, and a compiled model can be written with
them.

The format (IR version 11): a model declares configurations, each a number of devices; a node says under one of them how its inputs and
outputs are spread, and in which pipeline stage it is. Devices are ranks. `spread.py` has the format's description of one tensor, `read.py`
what stands in a model, `check.py` whether it holds, `seed.py` how it cuts nodes. `frontend/preserved.py` carries it through rewrites, and
`emit/annotated.py` is the way back. What the format has no word for stands in metadata, by the keys of `frontend/annotation_keys.py`.
"""
