"""The contract: all that compiler, checker and runtime share of an artifact; imports no other room of the runtime."""
