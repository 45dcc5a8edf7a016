"""What is known of dynamic dims: symbols, their facts, and facts of expressions over them."""
