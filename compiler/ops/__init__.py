"""The op table: one small file per family of ops, everything partc knows of an op in one entry.

Importing the package registers every family's entries.
"""

from partc.compiler.ops import elementwise, matmul

__all__ = ["elementwise", "matmul"]
