"""Ops of which nothing is cut: control flow, sequences, strings, and what only the whole decides."""

from __future__ import annotations

from partc.compiler.autodiff.engine import no_gradient
from partc.compiler.ops.registry import uncut

uncut("If", "Loop", "Scan", why="its bodies are run as they are")
uncut(
    *("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"),
    *("SequenceMap", "SplitToSequence", "ConcatFromSequence"),
    why="a sequence has no dims",
)
uncut("Optional", "OptionalGetElement", "OptionalHasElement", why="an optional has no dims")
uncut(
    *("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch"),
    why="strings do not travel between ranks",
)
uncut("Unique", why="how many distinct elements there are only the whole tells")
uncut("TfIdfVectorizer", why="its input is a list of words")
no_gradient("SequenceLength", "OptionalHasElement", "TfIdfVectorizer")
no_gradient("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch")
