"""Communication nodes of a rank file: the ops of `partc.comm`, their laws, schemas and readers."""
