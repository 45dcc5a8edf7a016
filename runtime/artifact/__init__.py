"""The format of an artifact, which compiler, checker and runtime share; of the runtime's other packages it imports only `files`."""
