"""The cases of all `rule_cases_*.py`."""

from __future__ import annotations

import importlib
from pathlib import Path

from rule_prover import Case

HERE = Path(__file__).parent
MODULES = [importlib.import_module(path.stem) for path in sorted(HERE.glob("rule_cases_*.py"))]
CASES: list[Case] = [one for module in MODULES for one in module.CASES]
