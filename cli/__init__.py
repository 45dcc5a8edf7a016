"""The command `partc`: compile, run, train, eval, checkpoint, verify, check, inspect, simulate, plan, schema, ops."""
