"""Cost formulas: one formula, one function, with its source and what it leaves out."""
