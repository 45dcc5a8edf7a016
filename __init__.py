"""Compiles one ONNX model and a plan into one program per rank (`partc.compiler`), and runs these (`partc.runtime`)."""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    """Returns the installed version as `__version__`: `0.1.0`; it is looked up then, which takes some milliseconds."""
    if name != "__version__":
        raise AttributeError(f"module 'partc' has no attribute '{name}'")
    from partc.runtime.artifact.format import release

    return release()
