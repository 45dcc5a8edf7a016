"""Text and tokens: a model's tokenizer, text out of tokens as they come, and the template of a conversation."""
