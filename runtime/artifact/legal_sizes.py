"""The sizes that a symbol allows, and messages about sizes that it does not: of inputs' dims, and of the batch in a training's settings.

batch: {divisor: 16}        16, 32, 48, ...
"""

from __future__ import annotations

from collections.abc import Iterator

from .format import Manifest, SymbolRecord, TrainingRecord


def wrong_batch(batch: int, manifest: Manifest, record: TrainingRecord | None = None) -> Iterator[str]:
    """Yields the reasons why a training's inputs cannot have `batch` records along their batch dims, one reason for each symbol.

    `record` is the training record of another program than the step; by default that of `manifest`.
    """
    record = record or manifest.training
    own = {*record.fixed, *record.scalars} if record is not None else set[str]()
    told = set[int | str]()
    for port in (port for port in manifest.inputs if port.name not in own and port.shape):
        dim = (port.shape or {0: ""})[port.batch_dim]
        law = manifest.symbols.get(dim) if isinstance(dim, str) else None
        if law is not None and dim not in told and not is_legal(batch, law):
            told.add(dim)
            yield refusal(f"the batch, '{dim}' of input '{port.name}',", batch, str(dim), law)
        elif isinstance(dim, int) and dim != batch:
            yield f"the batch is {batch}, and input '{port.name}' was compiled for {dim}"


def is_legal(size: int, law: SymbolRecord) -> bool:
    """Whether a dim of the symbol with this law may have a size."""
    least = law.divisor + law.remainder if law.divisor > 1 else law.remainder
    fits = (size - law.remainder) % law.divisor == 0 and size >= least
    return fits and size >= law.min and (law.max is None or size <= law.max)


def largest_legal(size: int, law: SymbolRecord) -> int:
    """Returns the largest legal size up to `size`, which must be at least the smallest legal size."""
    last = size if law.max is None else min(size, law.max)
    return last - (last - law.remainder) % law.divisor


def smallest(symbol: SymbolRecord) -> int:
    """The smallest legal size of a symbol that is not zero."""
    least = max(symbol.min, symbol.divisor + symbol.remainder if symbol.divisor > 1 else 1)
    return least + (symbol.remainder - least) % symbol.divisor


def typical_sizes(manifest: Manifest) -> dict[str, int]:
    """Maps each symbol to its size in estimates: the training's batch, else the largest legal size if it has one, else the smallest."""
    sizes = {
        name: smallest(symbol) if symbol.max is None else largest_legal(symbol.max, symbol)
        for name, symbol in manifest.symbols.items()
    }
    batch = manifest.training.settings.batch if manifest.training is not None else None
    firsts = {port.shape[0] for port in manifest.inputs if port.shape}
    for name, symbol in manifest.symbols.items():
        if batch is not None and name in firsts and is_legal(batch, symbol):
            sizes[name] = batch
    return sizes


def refusal(where: str, size: int, name: str, law: SymbolRecord) -> str:
    """The message about a size that a dim cannot have."""
    terms = []
    if law.divisor > 1:
        rest = f" + {law.remainder}" if law.remainder else ""
        terms.append(f"{law.divisor}*N{rest} with N at least 1")
    if law.min or not terms:
        terms.append(f"at least {law.min}")
    if law.max is not None:
        terms.append(f"at most {law.max}")
    return f"{where} is {size}\n  '{name}' is {', '.join(terms)}\n  help: {_nearest(size, law)}"


def _nearest(size: int, law: SymbolRecord) -> str:
    """Returns a text that names the legal sizes nearest to a size that is not legal."""
    step, rest = law.divisor, law.remainder
    low = max(law.min, step + rest if step > 1 else rest)
    first = low + (rest - low) % step
    last = None if law.max is None else law.max - (law.max - rest) % step
    if last is not None and last < first:
        return "no size is legal"
    below = size - (size - rest) % step
    around = [max(first, number if last is None else min(last, number)) for number in (below, below + step)]
    return f"{' or '.join(map(str, dict.fromkeys(around)))} would do"
