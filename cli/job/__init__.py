"""A job of ranks: what each is told, who starts and watches them, what they give back."""
