"""Facts about dynamic dims: symbols, their facts, and facts of expressions over them."""
