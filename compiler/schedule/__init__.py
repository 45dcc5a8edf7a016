"""The order of a step's tasks on every rank, as pure data: named schedules, rows as text, validity, simulation."""
