"""Messages, lookups and collectives of unknown size as actions of a step."""
