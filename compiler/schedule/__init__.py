"""The order of a step's tasks on every rank, as pure data: rows as text, validity, messages, simulation, memory."""
