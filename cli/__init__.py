"""The command `partc`: compile, run, verify, check, inspect, plan, schema, ops."""
