"""Text and tokens: a model's tokenizer, the decoding of tokens as they arrive, and the template of a conversation."""
