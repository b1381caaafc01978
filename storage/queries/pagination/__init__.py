"""Pages of an order in which events move: what a token means, and the statements for it."""
